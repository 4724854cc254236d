"""Every other collective of torch.distributed does through us what it does through gloo."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from sides import assert_alike, gradsync_group
from torch.distributed.device_mesh import DeviceMesh

import gradsync as gs
from gradsync.backend import GradsyncGroup
from gradsync.torch_backend.works import SharedWork

Run = Callable[..., list[Any]]


def size() -> int:
    return dist.get_world_size()


def broadcast(group: Any) -> Any:
    tensor = torch.randn(5)
    dist.broadcast(tensor, 1, group=group)
    work = dist.broadcast(tensor[:2], 0, group=group, async_op=True)
    work.wait()
    return tensor, work.is_completed(), work.get_future().done()


def reduce(group: Any) -> Any:
    tensor = torch.randn(5)
    dist.reduce(tensor, 0, group=group)
    return tensor if dist.get_rank() == 0 else None


def all_gather(group: Any) -> Any:
    mine = torch.randn(4)
    rows, whole = [torch.empty(4) for _ in range(size())], torch.empty(4 * size())
    dist.all_gather(rows, mine, group=group)
    dist.all_gather_into_tensor(whole, mine, group=group)
    coalesced = [torch.empty(4 * size()), torch.empty(2 * size())]
    with dist._coalescing_manager(group):
        dist.all_gather_into_tensor(coalesced[0], mine, group=group)
        dist.all_gather_into_tensor(coalesced[1], mine[:2], group=group)
    return rows, whole, coalesced


def reduce_scatter(group: Any) -> Any:
    whole, mine, listed = torch.randn(3 * size()), torch.empty(3), torch.empty(3)
    dist.reduce_scatter_tensor(mine, whole, group=group)
    dist.reduce_scatter(listed, list(whole.clone().chunk(size())), group=group)
    coalesced = [torch.empty(3)]
    with dist._coalescing_manager(group):
        dist.reduce_scatter_tensor(coalesced[0], whole, group=group)
    return mine, listed, coalesced


def parts_of_any_size(group: Any) -> Any:
    """Async and not, of every size, dtype and layout; what travels is what gloo would bring."""
    found: list[Any] = []
    for numel in (0, 1, 5000, 200_003):
        for dtype in (torch.float32, torch.bool, torch.complex64, torch.bfloat16):
            mine = torch.randn(numel).to(dtype)
            whole = torch.zeros(size() * numel, dtype=dtype)
            rows = [torch.zeros(2 * numel, dtype=dtype)[::2] for _ in range(size())]
            works = [
                dist.all_gather_into_tensor(whole, mine, group, async_op=True),
                dist.all_gather(rows, mine, group, async_op=True),
            ]
            for work in works:
                work.wait()
            found += [whole, [row.clone() for row in rows]]
        pieces, out = torch.randn(size() * numel), torch.zeros(2 * numel)[::2]
        dist.reduce_scatter_tensor(out, pieces, group=group, async_op=True).wait()
        average = torch.zeros(numel)
        dist.reduce_scatter_tensor(average, pieces, op=dist.ReduceOp.AVG, group=group)
        counts = torch.zeros(numel, dtype=torch.int64)
        dist.reduce_scatter_tensor(counts, torch.arange(size() * numel) + dist.get_rank(), group=group)
        biggest = torch.zeros(numel)
        dist.reduce_scatter_tensor(biggest, pieces, op=dist.ReduceOp.MAX, group=group)
        found += [out.clone(), average, counts, biggest]
    return found


def all_to_all(group: Any) -> Any:
    mine, out, rows = torch.randn(2 * size()), torch.empty(2 * size()), [torch.empty(2) for _ in range(size())]
    dist.all_to_all_single(out, mine, group=group)
    dist.all_to_all(rows, list(mine.chunk(size())), group=group)
    return out, rows


def gather_and_scatter(group: Any) -> Any:
    first, mine = dist.get_rank() == 0, torch.randn(3)
    rows = [torch.empty(3) for _ in range(size())] if first else None
    dist.gather(mine, rows, 0, group=group)
    dist.scatter(mine, rows, 0, group=group)
    return rows, mine


def messages(group: Any) -> Any:
    rank, mine, theirs = dist.get_rank(), torch.randn(3), torch.empty(3)
    peer = 1 - rank
    works = [dist.isend(mine, peer, group=group), dist.irecv(theirs, peer, group=group)]
    for work in works:
        work.wait()
    pair = [dist.P2POp(dist.isend, mine, peer, group), dist.P2POp(dist.irecv, theirs, peer, group)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    if rank == 0:
        dist.send(mine, 1, group=group, tag=7)
        return theirs
    return theirs, dist.recv(theirs, group=group, tag=7)  # from anybody, who is told


def objects(group: Any) -> Any:
    rank, found = dist.get_rank(), [None] * size()
    dist.all_gather_object(found, {"rank": rank}, group=group)
    listed = [rank, "a"]
    dist.broadcast_object_list(listed, 1, group=group)
    gathered: list[Any] | None = [None] * size() if rank == 0 else None
    dist.gather_object(rank, gathered, 0, group=group)
    mine = [None]
    dist.scatter_object_list(mine, ["x", "y"] if rank == 0 else None, 0, group=group)
    return found, listed, gathered, mine


def functional_ones(group: Any) -> Any:
    mine = torch.randn(4, 2)
    summed = functional.all_reduce(mine, "sum", group)
    gathered = functional.all_gather_tensor(mine, 0, group)
    scattered = functional.reduce_scatter_tensor(mine, "sum", 0, group)
    exchanged = functional.all_to_all_single(mine, None, None, group)
    pair = functional.all_reduce_coalesced([mine, mine + 1], "avg", group)
    return [torch.clone(each) for each in (summed, gathered, scattered, exchanged, *pair)]


def barriers(group: Any) -> Any:
    dist.barrier(group=group)
    dist.barrier(group=group, async_op=True).wait()
    return group.rank(), group.size(), dist.get_process_group_ranks(group)


def splitting(group: Any) -> Any:
    """Not offered by gloo without a device: the same refusal."""
    return dist.split_group(group, [[0], [1]])


CALLS = [
    *(broadcast, reduce, all_gather, reduce_scatter, parts_of_any_size, all_to_all, gather_and_scatter, messages),
    *(objects, barriers),
]


def all_alike() -> None:
    gloo, ours = dist.group.WORLD, gradsync_group()
    for call in [*CALLS, functional_ones, splitting]:
        assert_alike(call, gloo, ours)


def test_every_collective_does_what_gloo_does(run: Run) -> None:
    run(all_alike)


def parts_in_shared_memory() -> None:
    """That it is not gloo who does it; works as torch has them; ranks that bring different things."""
    ours, rank = gradsync_group(), dist.get_rank()
    whole, mine = torch.zeros(2, 3), torch.full((3,), float(rank))
    work = dist.all_gather_into_tensor(whole, mine, group=ours, async_op=True)
    assert isinstance(work, SharedWork)
    assert work.get_future().wait()[0] is whole  # gloo has no such future
    assert whole.tolist() == [[0.0] * 3, [1.0] * 3]
    out = torch.zeros(1, 3)
    work = dist.reduce_scatter_tensor(out, whole, group=ours, async_op=True)
    assert isinstance(work, SharedWork)
    assert [each.tolist() for each in work.get_future().wait()] == [[[2.0 * rank] * 3]]
    assert work.is_success()
    with pytest.raises(gs.Disagreement, match=r"rank 0: all_gather of 3 float32; rank 1: all_gather of 4 float32"):
        dist.all_gather_into_tensor(torch.zeros(2 * (3 + rank)), torch.zeros(3 + rank), group=ours)
    tensors = [torch.zeros(3), torch.zeros(6)]
    other = dist.reduce_scatter_tensor if rank == 0 else lambda _, whole, group: dist.all_reduce(whole, group=group)
    with pytest.raises(gs.Disagreement, match=r"rank 0: reduce_scatter of 3 float32 SUM; rank 1: 6 float32 SUM"):
        other(*tensors, group=ours)
    dist.all_gather_into_tensor(whole, mine, group=ours)  # and they can go on
    with pytest.raises((ValueError, RuntimeError)):  # torch's own words, before anything is sent
        dist.all_gather_into_tensor(torch.zeros(5), mine, group=ours)


def asked_and_not_waited_for() -> None:
    """Who polls finds the result; who disagreed leaves nothing behind."""
    ours, rank = gradsync_group(), dist.get_rank()
    rows = [torch.zeros(8)[::2] for _ in range(2)]
    counts = torch.full((3,), 10 + rank)
    works = [
        dist.all_gather(rows, torch.full((4,), 1.0 + rank), group=ours, async_op=True),
        dist.all_reduce(counts, dist.ReduceOp.AVG, group=ours, async_op=True),
    ]
    deadline = time.monotonic() + 30
    while not all(work.is_completed() for work in works):
        assert time.monotonic() < deadline
    assert [row.tolist() for row in rows] == [[1.0] * 4, [2.0] * 4]
    assert counts.tolist() == [10] * 3
    with pytest.raises(gs.Disagreement, match="rank 0: 3 float32 SUM; rank 1: 4 float32 SUM"):
        dist.all_reduce(torch.zeros(3 + rank), group=ours, async_op=True).wait()
    for _ in range(5):
        dist.all_reduce(torch.zeros(1000), group=ours, async_op=True).wait()
    assert len(ours._lane._under_way) <= 2  # the last ones, until the next is issued


def test_a_work_that_says_it_is_done_is_done(run: Run) -> None:
    run(asked_and_not_waited_for)


def test_parts_travel_in_shared_memory(run: Run) -> None:
    run(parts_in_shared_memory)


def groups_and_meshes() -> None:
    ours, rank = gradsync_group(), dist.get_rank()
    assert dist.get_backend(ours) == "cpu:gradsync"
    assert ours.name() == "gradsync"
    alone, _ = dist.new_subgroups(1)
    assert alone.size() == 1
    pair = dist.new_group([1, 2], backend="gradsync")
    if rank in (1, 2):
        assert isinstance(pair, GradsyncGroup)
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=pair)
        assert tensor.item() == 2
    mesh = DeviceMesh.from_group(ours, "cpu")
    tensor = functional.all_reduce(torch.ones(2), "sum", mesh)
    assert torch.clone(tensor).tolist() == [3, 3]
    dist.monitored_barrier(ours)
    if rank == 0:
        with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier"):
            dist.monitored_barrier(ours, timedelta(seconds=0.2))
    dist.barrier()
    dist.monitored_barrier()  # of the world, which is gloo's


def test_subgroups_meshes_and_the_monitored_barrier(run: Run) -> None:
    run(groups_and_meshes, ranks=3)


def compiled() -> None:
    ours = gradsync_group()

    def twice(tensor: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(tensor * 2, "sum", ours) + 1

    found = torch.compile(twice, backend="eager", fullgraph=True)(torch.ones(3))
    assert torch.clone(found).tolist() == [5, 5, 5]


def test_compiled_functional_collectives_go_through_us(run: Run) -> None:
    run(compiled)
