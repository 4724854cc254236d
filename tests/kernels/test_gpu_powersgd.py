"""PowerSGD's passes in Triton agree with those in torch, as far as sums in another order do."""

from __future__ import annotations

import pytest
import torch

from gradsync.kernels import powersgd_kernels
from silent_device import host_never_waits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPES = ((1, 1, 1), (5, 7, 2), (33, 65, 4), (769, 307, 3), (768, 3072, 4), (130, 1027, 8), (300, 256, 16))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def draw(m: int, n: int, r: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """grad, residual, p, q and another q, for three matrices."""
    generator = torch.Generator().manual_seed(m * n + r)
    shapes = ((3, m, n), (3, m, n), (3, m, r), (3, n, r), (3, n, r))
    grad, *others = (torch.randn(shape, generator=generator) for shape in shapes)
    return [grad.to(dtype), *others]


def assert_near(ours: torch.Tensor, truth: torch.Tensor, tolerance: float = 1e-5) -> None:
    """By norm, against the truth in fp64."""
    error = (ours.cpu().double() - truth.double()).norm() / truth.double().norm()
    assert error < tolerance, error


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pass_agrees_with_fp64(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    here = draw(*shape, dtype)
    grad, residual, p, q_own, q_sum = (each.cuda() for each in here)
    first = (here[0].float() + here[1]).double()
    assert_near(powersgd_kernels.project(grad, residual, q_own), first @ here[3].double())
    assert torch.equal(residual.cpu(), here[0].float() + here[1])
    assert_near(powersgd_kernels.project_back(residual, p), first.mT @ here[2].double())
    powersgd_kernels.restore(grad, residual, p, q_own, q_sum)
    assert_near(residual, first - here[2].double() @ here[3].double().mT)
    assert_near(grad, here[2].double() @ here[4].double().mT, {torch.float32: 1e-5}.get(dtype, 4e-3))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_orthonormal_columns_are_those_of_the_cpu(shape: tuple[int, int, int]) -> None:
    p = draw(*shape, torch.float32)[2]
    ours = p.cuda()
    powersgd_kernels.orthogonalize(ours)
    powersgd_kernels.orthogonalize(p)
    torch.testing.assert_close(ours.cpu(), p, rtol=1e-3, atol=1e-4)


def test_a_column_that_depends_on_others_becomes_zeros_and_nan_stays() -> None:
    column = torch.randn(2, 5000, 1)
    p = torch.cat((column, -3 * column, torch.zeros(2, 5000, 1), torch.ones(2, 5000, 1)), dim=2).cuda()
    p[1, 17, 0] = float("inf")
    powersgd_kernels.orthogonalize(p)
    assert torch.equal(p[0, :, 1:3], torch.zeros(5000, 2, device="cuda"))
    torch.testing.assert_close(p[0].norm(dim=0).cpu(), torch.tensor([1.0, 0, 0, 1]))
    assert bool(p[1].isnan().any())


def test_a_spoiled_matrix_shows_and_is_clean_in_the_next_step() -> None:
    grad, residual, p, q_own, q_sum = (each.cuda() for each in draw(33, 65, 4, torch.bfloat16))
    p[1, 3, 2] = float("nan")
    powersgd_kernels.restore(grad, residual, p, q_own, q_sum)
    assert bool(grad[1].isnan().all())
    assert not residual[1].any()
    assert bool(grad[::2].isfinite().all() & residual[::2].isfinite().all())


def test_the_same_bits_every_time() -> None:
    grad, residual, p, q, _ = (each.cuda() for each in draw(769, 307, 3, torch.float32))
    for _ in range(3):
        assert torch.equal(
            powersgd_kernels.project(grad, residual.clone(), q), powersgd_kernels.project(grad, residual.clone(), q)
        )
        assert torch.equal(powersgd_kernels.project_back(residual, p), powersgd_kernels.project_back(residual, p))


def test_the_host_never_waits_for_the_device() -> None:
    grad, residual, p, q_own, q_sum = (each.cuda() for each in draw(33, 65, 4, torch.float32))
    with host_never_waits():
        powersgd_kernels.orthogonalize(powersgd_kernels.project(grad, residual, q_own))
        powersgd_kernels.project_back(residual, p)
        powersgd_kernels.restore(grad, residual, p, q_own, q_sum)
