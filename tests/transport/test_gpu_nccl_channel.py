"""A channel over NCCL: every collective against the same on the host, and what is left of it after an abort."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradsync.plan.guard import Guard
from gradsync.transport.lane import Lane, open_lane
from gradsync.transport.nccl_channel import NcclChannel
from gradsync.transport.nccl_library import NcclError

Run = Callable[..., list[Any]]
CUDA = torch.device("cuda")
SUMMED = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8]


@contextmanager
def opened() -> Iterator[tuple[Lane, NcclChannel]]:
    """A lane of all ranks, and its channel between their GPUs."""
    world = dist.group.WORLD
    assert world is not None
    lane = open_lane(world, Guard(), 30.0)
    lane.groups.add_data(world, {"cuda": CUDA})
    [channel] = lane.groups.on_streams
    yield lane, channel
    lane.close(together=True)


def numbers(rank: int, dtype: torch.dtype = torch.float32, count: int = 1000) -> torch.Tensor:
    return torch.randint(0, 9, (count,), generator=torch.Generator().manual_seed(rank)).to(dtype)


def collectives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    everybody = [numbers(each) for each in range(size)]
    with opened() as (_, channel):
        for dtype in [*SUMMED, torch.complex64]:
            found = numbers(rank, dtype).cuda()
            channel.sum(found).wait()
            assert torch.equal(found.cpu(), torch.stack([each.to(dtype) for each in everybody]).sum(0).to(dtype)), dtype
        for source in range(size):
            found = numbers(rank).cuda()
            channel.broadcast(found, source).wait()
            assert torch.equal(found.cpu(), everybody[source])
        rows = torch.zeros(size, 1000, device=CUDA)
        channel.gather(rows, numbers(rank).cuda()).wait()
        assert torch.equal(rows.cpu(), torch.stack(everybody))
        traded = torch.zeros(size, 1000 // size, device=CUDA)
        channel.trade(traded, numbers(rank)[: 1000 // size * size].cuda()).wait()
        parts = [each[: 1000 // size * size].view(size, -1)[rank] for each in everybody]
        assert torch.equal(traded.cpu(), torch.stack(parts))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_collectives_are_those_of_the_host(nccl: Run, ranks: int) -> None:
    nccl(collectives, ranks=ranks, timeout=120)


def messages_in_a_ring() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with opened() as (_, channel):
        mine, theirs = numbers(rank).cuda(), torch.zeros(1000, device=CUDA)

        def issue() -> None:
            channel.recv(theirs, (rank - 1) % size)
            channel.send(mine, (rank + 1) % size)

        for _ in range(3):
            channel.batch(mine.device, issue)
        assert torch.equal(theirs.cpu(), numbers((rank - 1) % size))


@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_of_a_batch_reach_their_receivers(nccl: Run, ranks: int) -> None:
    nccl(messages_in_a_ring, ranks=ranks, timeout=120)


def misuses() -> list[str]:
    found = []
    with opened() as (_, channel):
        for wrong in (torch.zeros(8, dtype=torch.int16, device=CUDA), torch.zeros(4, 4, device=CUDA).t()):
            try:
                channel.sum(wrong)
            except (TypeError, ValueError) as error:
                found.append(str(error))
    return found


def test_what_nccl_cannot_take_is_said_before_anything_is_sent(nccl: Run) -> None:
    for found in nccl(misuses, timeout=120):
        assert found == ["NCCL cannot add up torch.int16 tensors", "NCCL takes contiguous tensors, got strides (1, 4)"]


def abort_alone() -> list[Any]:
    """Rank 0 launches what rank 1 never joins, and gives up."""
    told: list[Any] = []
    with opened() as (lane, channel):
        if dist.get_rank() == 0:
            work = channel.sum(torch.ones(1 << 20, device=CUDA))
            told.append(work.landed())
            channel.abort()
            told += [channel.aborted(10.0), channel.failure()]
            torch.cuda.synchronize()  # the kernel has ended
            try:
                channel.sum(torch.ones(4, device=CUDA))
            except NcclError as error:
                told.append(str(error))
        else:
            lane.exchange(b"!")  # until rank 0 has given up
            channel.abort()
        if dist.get_rank() == 0:
            lane.exchange(b"!")
    return told


def test_an_abort_ends_what_waits_for_another_rank(nccl_alone: Run) -> None:
    outcomes = nccl_alone(abort_alone, timeout=120)
    assert [outcome.text for outcome in outcomes] == ["returned", "returned"]
    assert outcomes[0].value == [False, True, None, "this communicator was aborted"]


def close_while_the_other_works() -> None:
    """Rank 1's GPU comes late to the last collective; rank 0 is done with it and closes at once."""
    with opened() as (lane, _):
        found = torch.ones(1 << 22, device=CUDA)
        if dist.get_rank() == 1:
            torch.cuda._sleep(1_000_000_000)
        lane.wait(lane.launch(lambda: lane.groups.data["cuda"].sum(found), "a sum", found.nbytes))
    assert found.sum().item() == 2.0 * (1 << 22)


def test_no_communicator_goes_before_every_gpu_is_through(nccl: Run) -> None:
    for _ in range(3):
        nccl(close_while_the_other_works, timeout=120)
