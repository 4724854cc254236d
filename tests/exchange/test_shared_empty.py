"""gs.shared_empty: a tensor like any other, that all_reduce adds up where it lies."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradsync as gs
from gradsync.exchange.group_cache import group_cache
from gradsync.kernels.library import OpKind
from gradsync.transport.host_meeting import declare_host

LARGE = 70_001  # more than a board, a block or a window holds


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def total(numel: int, dtype: torch.dtype = torch.float32, ranks: Any = None) -> torch.Tensor:
    """As the team adds: in rank order, half types in fp32."""
    rows = [values(rank, numel, dtype) for rank in ranks or range(dist.get_world_size())]
    return sum(row.double() for row in rows).to(dtype)  # type: ignore[union-attr,return-value]


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    eps = torch.finfo(a.dtype).eps
    return bool(torch.allclose(a.double(), b.double(), rtol=4 * eps, atol=16 * eps))


# What it is


def make_many() -> None:
    cases: list[tuple[Any, Any]] = [
        (5, None),
        ((3, 4), torch.float64),
        ([2, 3, 5], torch.bfloat16),
        ((), torch.int64),
        (0, torch.float16),
        ((4, 0, 2), torch.float32),
        ((7,), torch.complex64),
        (torch.Size([2, 2]), torch.uint8),
    ]
    for shape, dtype in cases:
        tensor = gs.shared_empty(shape, dtype)
        assert tensor.shape == torch.empty(shape).shape
        assert tensor.dtype == (dtype or torch.get_default_dtype())
        assert tensor.is_contiguous()
        assert tensor.is_cpu
        assert not tensor.requires_grad
        assert not bool(tensor.any()), "it holds zeros"
        tensor.fill_(dist.get_rank() + 1)  # one's own: the others' stay theirs
        dist.barrier()
        assert bool((tensor == dist.get_rank() + 1).all())
        dist.barrier()


@pytest.mark.parametrize("ranks", [1, 3])
def test_it_has_the_shape_and_dtype_asked_for_and_holds_zeros(ranks: int, run: Callable[..., Any]) -> None:
    run(make_many, ranks=ranks)


# all_reduce of it


def reduce_in_place() -> list[list[float]]:
    rank, found = dist.get_rank(), []
    for dtype in (torch.float32, torch.bfloat16):
        tensor = gs.shared_empty((LARGE,), dtype)
        team = group_cache(dist.group.WORLD).lane.team  # type: ignore[arg-type]
        assert team is not None
        assert team.sum_op(tensor, b"").kind == OpKind.DIRECT
        tensor.copy_(values(rank, LARGE, dtype))
        address = tensor.data_ptr()
        result = gs.all_reduce(tensor, op="sum")
        assert result is tensor
        assert tensor.data_ptr() == address
        assert close(tensor, total(LARGE, dtype))
        # The same bits as by way of the windows.
        assert torch.equal(tensor, gs.all_reduce(values(rank, LARGE, dtype), op="sum"))
        tensor.copy_(values(rank, LARGE, dtype))
        gs.all_reduce(tensor)
        assert torch.equal(tensor, gs.all_reduce(values(rank, LARGE, dtype)))
        found.append(tensor[:100].tolist())
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_it_is_reduced_where_it_lies_with_the_bits_of_any_other(ranks: int, run: Callable[..., Any]) -> None:
    found = run(reduce_in_place, ranks=ranks)
    assert all(each == found[0] for each in found)


def reduce_views() -> None:
    rank = dist.get_rank()
    whole = gs.shared_empty((4, LARGE), torch.float32)
    for view in (
        lambda: whole[2],
        lambda: whole[1:3].view(-1)[5 : 5 + LARGE],
        lambda: whole.t()[:, 1],  # a row again
        lambda: whole.view(-1)[::4],  # not contiguous: staged
        lambda: whole[:, : LARGE // 4],
    ):
        whole.fill_(-7.0)
        dist.barrier()  # nobody fills a row that another rank already adds up
        part = view()
        mine = values(rank, part.numel()).view(part.shape)
        part.copy_(mine)
        gs.all_reduce(part, op="sum")
        assert close(view(), total(part.numel()).view(part.shape))
        untouched = whole.clone()
        _same_place(untouched, whole, part).fill_(-7.0)
        assert bool((untouched == -7.0).all()), "beside the view nothing was written"
        dist.barrier()


def _same_place(copy: torch.Tensor, whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return copy.as_strided(part.shape, part.stride(), part.storage_offset() - whole.storage_offset())


def test_views_of_it_are_reduced_too_and_nothing_beside_them(run: Callable[..., Any]) -> None:
    run(reduce_views, ranks=3)


def bring_different_places() -> list[bool]:
    """Some bring shared memory, some do not, some at another place in it: only the values count."""
    rank, found = dist.get_rank(), []
    first, second = gs.shared_empty(2 * LARGE), gs.shared_empty(2 * LARGE)
    for case in ("shared and plain", "two segments", "two places", "all the same"):
        place = first[:LARGE]
        if case == "shared and plain" and rank == 1:
            place = torch.empty(LARGE)
        if case == "two segments" and rank == 1:
            place = second[:LARGE]
        if case == "two places" and rank == 2:
            place = first[3 : 3 + LARGE]
        place.copy_(values(rank, LARGE))
        gs.all_reduce(place, op="sum")
        found.append(close(place, total(LARGE)))
        dist.barrier()
    return found


def test_ranks_may_bring_different_memory(run: Callable[..., Any]) -> None:
    assert run(bring_different_places, ranks=3) == [[True] * 4] * 3


def bring_different_places_on_two_hosts() -> list[bool]:
    declare_host(f"host-{dist.get_rank() // 2}")
    try:
        rank, found = dist.get_rank(), []
        memory = gs.shared_empty(2 * LARGE)
        for case in ("all the same", "shared and plain", "two places"):
            place = memory[:LARGE]
            if case == "shared and plain" and rank in (1, 3):
                place = torch.empty(LARGE)
            if case == "two places" and rank in (1, 3):
                place = memory[3 : 3 + LARGE]
            place.copy_(values(rank, LARGE))
            gs.all_reduce(place, op="sum", algorithm=gs.hierarchical())
            found.append(close(place, total(LARGE)))
            dist.barrier()
    finally:
        declare_host(None)
    return found


def test_ranks_of_two_hosts_may_bring_different_memory(run: Callable[..., Any]) -> None:
    assert run(bring_different_places_on_two_hosts, ranks=4) == [[True] * 3] * 4


# What goes wrong


def ask_differently(kind: str) -> tuple[str, float]:
    odd = dist.get_rank() == 1
    shape, dtype = (4 if odd and kind == "shape" else 3), (torch.float64 if odd and kind == "dtype" else torch.float32)
    try:
        gs.shared_empty(shape, dtype)
        said = "nothing"
    except gs.Disagreement as error:
        said = str(error)
    tensor = gs.shared_empty(10)
    tensor.fill_(1.0)
    return said, float(gs.all_reduce(tensor, op="sum")[0])


@pytest.mark.parametrize(("kind", "other"), [("shape", "float32[4]"), ("dtype", "float64[3]")])
def test_different_shapes_are_the_same_error_on_every_rank(kind: str, other: str, run: Callable[..., Any]) -> None:
    sentence = (
        "shared_empty was called with different tensors (rank 0: float32[3] shared_empty; "
        f"rank 1: {other} shared_empty; rank 2: float32[3] shared_empty); every rank must bring the same"
    )
    assert run(ask_differently, kind, ranks=3) == [(sentence, 3.0)] * 3


def ask_for_too_much(lacking: int) -> tuple[str, float]:
    assert gs.all_reduce(torch.ones(1)).item() == 1.0  # the group is there; only memory lacks
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == lacking:
        resource.setrlimit(resource.RLIMIT_FSIZE, (512 << 10, before[1]))
    try:
        gs.shared_empty(1 << 20 if lacking >= 0 else 1 << 45)
        said = "nothing"
    except gs.GradSyncError as error:
        said = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    tensor = gs.shared_empty(LARGE)
    tensor.fill_(2.0)
    return said, float(gs.all_reduce(tensor, op="sum")[-1])


def test_too_much_is_an_error_that_says_how_much_and_the_group_still_works(run: Callable[..., Any]) -> None:
    for said, after in run(ask_for_too_much, -1, ranks=3):
        assert said.startswith("gradsync needs 140737.5 GB of shared memory for each of the 3 ranks of this host, but ")
        assert said.endswith("; ask for less, or use a plain tensor")
        assert after == 6.0
    for said, after in run(ask_for_too_much, 0, ranks=3):
        assert said.startswith("gradsync needs 4.2 MB of shared memory ")
        assert said.endswith("; ask for less, or use a plain tensor")
        assert after == 6.0


def call_wrongly() -> list[str]:
    said = []
    for shape in (-1, (2, -3), 1.5, "3"):
        try:
            gs.shared_empty(shape)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            said.append(str(error))
    return said


def test_a_wrong_shape_is_refused(run: Callable[..., Any]) -> None:
    first, second = run(call_wrongly)
    assert first == second
    assert len(first) == 4
    for text, shape in zip(first, ("-1", "(2, -3)", "1.5", "'3'"), strict=True):
        assert text == f"shape must be a whole number of at least 0, or several, got {shape}"


# Who takes part


def reduce_in_pairs() -> tuple[list[float], str]:
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[rank % 2]
    tensor = gs.shared_empty(LARGE, group=mine)
    tensor.copy_(values(rank, LARGE))
    gs.all_reduce(tensor, op="sum", group=mine)
    assert close(tensor, total(LARGE, ranks=(rank % 2, rank % 2 + 2)))
    # In another group the same tensor is one like any other.
    tensor.fill_(1.0)
    gs.all_reduce(tensor, op="sum")
    try:
        gs.shared_empty(3, group=groups[1 - rank % 2])
        said = "nothing"
    except ValueError as error:
        said = str(error)
    return tensor[:2].tolist(), said


def test_a_subgroup_has_memory_of_its_own(run: Callable[..., Any]) -> None:
    sentence = "this rank is not a member of the group given to shared_empty; only members may call it"
    assert run(reduce_in_pairs, ranks=4) == [([4.0, 4.0], sentence)] * 4


def ask_alone_on_a_host() -> str:
    declare_host(f"host-{dist.get_rank()}")
    try:
        gs.shared_empty(3)
    except gs.GradSyncError as error:
        return str(error)
    finally:
        declare_host(None)
    return "nothing"


def test_where_nobody_shares_a_host_there_is_none(run: Callable[..., Any]) -> None:
    sentence = "there is no shared memory here: every rank of this group has a host of its own; use a plain tensor"
    assert run(ask_alone_on_a_host) == [sentence] * 2


def test_without_a_group_shared_empty_says_how_to_get_one() -> None:
    with pytest.raises(ValueError, match=r"there is no process group yet; call gs.init\(\) before gs.shared_empty\(\)"):
        gs.shared_empty(3)
