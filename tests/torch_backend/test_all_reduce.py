"""Sums in shared memory are gloo's, to the bit where gloo adds in the same order: with two ranks always."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sides import assert_alike, flat, gradsync_group

import gradsync as gs
from gradsync.torch_backend.works import CompletedWork, SharedWork

Run = Callable[..., list[Any]]

OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
GLOO_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
NUMELS = (0, 1, 1000, 100_003)  # by the boards, and through the windows


def numbers(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(numel) * 3).to(dtype) if dtype.is_floating_point else torch.randint(0, 5, (numel,)).to(dtype)


def every_op_and_dtype() -> None:
    gloo, ours = dist.group.WORLD, gradsync_group()
    for op in OPS:
        for dtype in GLOO_DTYPES:
            if op == "AVG" and dtype in INTEGERS:
                continue  # gloo refuses; see test_backend_stories.py
            for numel in NUMELS if op in ("SUM", "AVG") else (7,):

                def call(group: Any, op: str = op, dtype: torch.dtype = dtype, numel: int = numel) -> torch.Tensor:
                    tensor = numbers(numel, dtype)
                    dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group=group)
                    return tensor

                assert_alike(call, gloo, ours)


def test_every_op_and_dtype_of_gloo_gives_gloos_bits_or_its_error(run: Run) -> None:
    run(every_op_and_dtype)


def of_three_ranks() -> None:
    ours = gradsync_group()
    torch.manual_seed(dist.get_rank())
    for numel in (5, 50_000):
        mine = torch.randn(numel)
        everyones = [torch.empty(numel) for _ in range(3)]
        dist.all_gather(everyones, mine)
        dist.all_reduce(mine, group=ours)
        torch.testing.assert_close(mine, sum(everyones))
        gathered = [torch.empty(numel) for _ in range(3)]
        dist.all_gather(gathered, mine)
        assert all(torch.equal(each, mine) for each in gathered)  # replicas stay replicas


def test_three_ranks_get_one_sum_the_same_everywhere(run: Run) -> None:
    run(of_three_ranks, ranks=3)


def strange_forms(group: Any) -> list[torch.Tensor]:
    base, sparse = torch.arange(12.0).view(3, 4) + dist.get_rank(), torch.eye(3).to_sparse()
    dist.all_reduce(base.t(), group=group)
    dist.all_reduce(base[:, ::2], group=group)  # like gloo: as many elements, from where it begins
    dist.all_reduce(base[1], group=group)
    with torch.no_grad():
        parameter = torch.ones(3, requires_grad=True)
        dist.all_reduce(parameter, group=group)
    dist.all_reduce(sparse, group=group)
    pair = [torch.ones(3), torch.full((2, 2), 2.0)]
    dist.all_reduce_coalesced(pair, group=group)
    raw = torch.ones(4)
    group.allreduce(raw).wait()
    group.allreduce([raw]).wait()
    with dist._coalescing_manager(group):
        dist.all_reduce(pair[0], group=group)
        dist.all_reduce(pair[1], group=group)
    return [base, parameter.detach(), sparse, *pair, raw]


def works() -> None:
    ours, rank = gradsync_group(), dist.get_rank()
    works = [dist.all_reduce(torch.full((n,), 1.0 + rank), group=ours, async_op=True) for n in (3, 70_000, 5)]
    assert all(isinstance(work, SharedWork) for work in works)
    futures = [work.get_future().then(lambda future: future.value()[0].sum().item()) for work in works]
    assert [future.wait() for future in futures] == [9, 210_000, 15]
    assert all(work.wait() and work.is_completed() and work.is_success() for work in works)
    assert works[0].exception() is None
    assert flat(works[0].result()) == flat([torch.full((3,), 3.0)])
    later = works[0].get_future()
    assert later.done()
    # One rank may wait at once and the other later: they meet all the same.
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, group=ours, async_op=rank == 0)
    assert (work is None) == (rank == 1)
    if work is not None:
        work.wait()
    assert tensor.tolist() == [2, 2]
    assert isinstance(ours.allreduce([torch.ones(1)], now()), CompletedWork)


def now() -> Any:
    options = torch._C._distributed_c10d.AllreduceOptions()
    options.asyncOp = False
    return options


def nested_futures() -> float:
    """As PowerSGD's hook has it: a callback of one sum starts another and waits for its future."""
    ours = gradsync_group()

    def again(future: Any) -> Any:
        return dist.all_reduce(future.value()[0], group=ours, async_op=True).get_future().wait()[0]

    work = dist.all_reduce(torch.ones(1), group=ours, async_op=True)
    value: float = work.get_future().then(again).wait().item()
    return value


def forms_works_and_futures() -> None:
    assert_alike(strange_forms, dist.group.WORLD, gradsync_group())
    works()
    assert nested_futures() == 4


def test_strange_forms_works_and_futures_are_as_gloo_has_them(run: Run) -> None:
    run(forms_works_and_futures)


def disagreement() -> None:
    ours, rank = gradsync_group(), dist.get_rank()
    with pytest.raises(gs.Disagreement, match=r"rank 0: 3 float32 SUM; rank 1: 4 float32 SUM"):
        dist.all_reduce(torch.ones(3 + rank), group=ours)
    with pytest.raises(gs.Disagreement, match="rank 1: 3 float64 SUM"):
        dist.all_reduce(torch.ones(3, dtype=[torch.float32, torch.float64][rank]), group=ours, async_op=True).wait()
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=ours)  # nothing was touched, and it goes on
    assert tensor.tolist() == [2, 2, 2]


def test_ranks_that_bring_different_tensors_all_say_so_and_go_on(run: Run) -> None:
    run(disagreement)


def late_rank() -> None:
    ours = gradsync_group(seconds=1)
    if dist.get_rank() == 0:
        with pytest.raises(gs.SyncTimeout, match="rank 1"):
            dist.all_reduce(torch.ones(3), group=ours, async_op=True).wait(timedelta(seconds=0.3))
        with pytest.raises(gs.GradSyncError, match="cannot go on"):
            dist.all_reduce(torch.ones(3), group=ours)
    dist.barrier()


def test_a_wait_ends_with_its_timeout_and_names_who_is_late(run: Run) -> None:
    run(late_rank)


def long_wait() -> None:
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=gradsync_group(), async_op=True).wait(timedelta.max)
    assert tensor.tolist() == [2, 2, 2]


def test_a_wait_may_have_any_bound(run: Run) -> None:
    run(long_wait)
