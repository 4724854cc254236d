"""PowerSGD's passes on the CPU, as laws: nothing is lost, columns are orthonormal, a batch is only a batch."""

from __future__ import annotations

import pytest
import torch

from gradsync.kernels.powersgd_kernels import orthogonalize, project, project_back, restore

SHAPES = (
    (1, 1, 1),
    (7, 5, 1),
    (5, 7, 2),
    (33, 65, 4),
    (769, 307, 3),
    (1000, 10, 2),
    (128, 1027, 8),
    (255, 243, 1),
    (9, 167, 8),
    (16, 16, 16),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def draw(batch: int, m: int, n: int, r: int) -> tuple[torch.Tensor, ...]:
    """grad, residual, q."""
    generator = torch.Generator().manual_seed(m * n + r)
    shapes = ((batch, m, n), (batch, m, n), (batch, n, r))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def one_step(grad: torch.Tensor, residual: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A step of one rank, in place; p and q of it."""
    p = project(grad, residual, q)
    orthogonalize(p)
    q = project_back(residual, p)
    restore(grad, residual, p, q, q)
    return p, q


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_restored_and_what_is_left_add_up_to_what_there_was(shape: tuple[int, int, int]) -> None:
    grad, residual, q = draw(3, *shape)
    before = grad + residual
    one_step(grad, residual, q)
    torch.testing.assert_close(grad + residual, before, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_columns_become_orthonormal(shape: tuple[int, int, int]) -> None:
    m, _, r = shape
    p = torch.randn(4, m, r, generator=torch.Generator().manual_seed(0))
    orthogonalize(p)
    expected = torch.eye(r).expand(4, r, r) * (torch.arange(r) < m)
    torch.testing.assert_close(p.mT @ p, expected, rtol=0, atol=2e-4)


def test_a_matrix_of_small_rank_is_restored_whole() -> None:
    left, right = torch.randn(2, 40, 3), torch.randn(2, 3, 50)
    grad, residual = left @ right, torch.zeros(2, 40, 50)
    one_step(grad, residual, torch.randn(2, 50, 3))
    torch.testing.assert_close(grad, left @ right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_matrix_gives_the_same_bits_in_every_batch(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    grad, residual, q = draw(3, *shape)
    grad = grad.to(dtype)
    alone = [[each[i : i + 1].clone() for each in (grad, residual, q)] for i in range(3)]
    together = one_step(grad, residual, q)
    for i, (own_grad, own_residual, own_q) in enumerate(alone):
        factors = one_step(own_grad, own_residual, own_q)
        for ours, all_of_them in zip((own_grad, own_residual, *factors), (grad, residual, *together), strict=True):
            assert torch.equal(ours[0], all_of_them[i]), i


def test_a_column_that_depends_on_others_becomes_zeros() -> None:
    column = torch.randn(2, 50, 1)
    p = torch.cat((column, -3 * column, torch.zeros(2, 50, 1), torch.ones(2, 50, 1)), dim=2)
    orthogonalize(p)
    assert torch.equal(p[:, :, 1:3], torch.zeros(2, 50, 2))
    torch.testing.assert_close(p.norm(dim=1), torch.tensor([[1.0, 0, 0, 1]] * 2))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_spoiled_matrix_shows_and_is_clean_in_the_next_step(value: float) -> None:
    grad, residual, q = draw(3, 20, 30, 2)
    grad[1, 3, 4] = value
    sound = [one_step(*(each[i : i + 1].clone() for each in (grad, residual, q)))[0] for i in (0, 2)]
    p, _ = one_step(grad, residual, q)
    assert bool(grad[1].isnan().all())
    assert torch.equal(residual[1], torch.zeros(20, 30))
    assert bool(grad[::2].isfinite().all())
    assert torch.equal(p[::2], torch.cat(sound))
