"""What strangers found in the backend, each once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from sides import begin_again, gradsync_group
from torch._subclasses.fake_tensor import FakeTensorMode

import gradsync as gs
from gradsync.torch_backend.group import GradsyncGroup

Run = Callable[..., list[Any]]


def tensors_without_memory() -> None:
    """An AsyncCollectiveTensor and a FakeTensor have a pointer, and nothing behind it."""
    group = gradsync_group()
    under_way = functional.all_reduce(torch.ones(3), "sum", group)
    dist.all_reduce(under_way, group=group)
    assert under_way.tolist() == [4, 4, 4]
    with FakeTensorMode():
        dist.all_reduce(torch.ones(100_000), group=group)


def means_of_integers() -> None:
    """Lightning asks for them of every backend that is not called gloo."""
    group, rank = gradsync_group(), dist.get_rank()
    for numel in (3, 100_000):
        now, later = torch.full((numel,), 2 + 3 * rank), torch.full((numel,), -2 - 3 * rank)
        dist.all_reduce(now, dist.ReduceOp.AVG, group=group)
        work = dist.all_reduce(later, dist.ReduceOp.AVG, group=group, async_op=True)
        (from_future,) = work.get_future().wait()
        work.wait()
        assert now.unique().tolist() == [3]  # of 2 and 5
        assert later.unique().tolist() == from_future.unique().tolist() == [-3]


def bounds() -> None:
    """Each wait keeps its own, also beside a future; and torch may change the group's."""
    first, second, rank = gradsync_group(seconds=60), gradsync_group(seconds=60), dist.get_rank()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5), second)
    if rank == 0:
        work = dist.all_reduce(torch.ones(10), group=first, async_op=True)
        work.get_future()
        with pytest.raises(gs.SyncTimeout, match=r"waited 0\.\d s for all_reduce"):
            work.wait(timedelta(seconds=0.2))
        with pytest.raises(gs.SyncTimeout, match=r"dist\.init_process_group\(timeout="):
            dist.all_reduce(torch.ones(10), group=second)
    dist.barrier()


def a_disagreement_in_the_middle() -> None:
    """One rank adds up itself, the other has its worker do it: afterwards both are at the same place."""
    group, rank = gradsync_group(), dist.get_rank()
    tensors = [torch.ones(10 + rank), torch.ones(5)]
    if rank == 0:
        with pytest.raises(gs.Disagreement, match="different tensors"):
            dist.all_reduce_coalesced(tensors, group=group)
    else:
        future = dist.all_reduce_coalesced(tensors, group=group, async_op=True)
        with pytest.raises(RuntimeError, match="different tensors"):
            future.wait()
    after = torch.full((4,), 10.0)
    dist.all_reduce(after, group=group)
    assert after.tolist() == [20] * 4


def one_group_after_the_other(folder: Path) -> None:
    """What keeps the store alive keeps rank 0's port taken: a group that is destroyed lets go of it at once."""
    gc.disable()
    try:
        begin_again(folder, "cpu:gradsync")
        assert isinstance(dist.group.WORLD, GradsyncGroup)
        dist.all_reduce(torch.ones(3))
        lane = weakref.ref(dist.group.WORLD._lane)
        assert lane() is not None
        dist.destroy_process_group()
        assert lane() is None
    finally:
        gc.enable()


def test_a_tensor_without_memory_of_its_own_is_summed(run: Run) -> None:
    run(tensors_without_memory)


def test_a_mean_of_integers_is_an_integer(run: Run) -> None:
    run(means_of_integers)


def test_after_a_disagreement_the_ranks_are_at_one_place(run: Run) -> None:
    run(a_disagreement_in_the_middle)


def test_each_wait_keeps_its_own_bound(run: Run) -> None:
    run(bounds)


def test_a_destroyed_group_lets_go_of_the_store(run: Run, tmp_path: Path) -> None:
    run(one_group_after_the_other, tmp_path)


def nccl_is_not_here(folder: Path) -> None:
    begin_again(folder, "cpu:gradsync,cuda:nccl")
    with pytest.raises(ValueError, match="built without NCCL, which cuda:nccl asks for; say cuda:gloo"):
        dist.barrier()


@pytest.mark.skipif(dist.is_nccl_available(), reason="NCCL is here")
def test_a_backend_that_this_torch_has_not_is_named(run: Run, tmp_path: Path) -> None:
    run(nccl_is_not_here, tmp_path)
