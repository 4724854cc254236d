"""The ranks wait for each other before every measurement, so that none counts another's lateness.

On one host they watch each other's counters in a page of memory and leave within a microsecond or two. The
barrier of the process group would let them go one after another, later than a small all-reduce takes.

    │ rank 0's count … │ rank 1's count … │      a cache line each, in a memfd of rank 0: it has no name,
                                               so nothing is left behind
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch.distributed as dist

from gradsync.cli.bench.rank_exchange import decide
from gradsync.errors import GradSyncError, place

_STRIDE = 8  # counts to a cache line
_PATIENCE_S = 300.0  # others may fill, sweep or check what is large, on cores that are shared


class RankBarrier(Protocol):
    """A barrier."""

    def arrive(self) -> None:
        """Return when every rank has called this."""


class GroupBarrier:
    """The process group's own barrier, for ranks that share no memory."""

    def arrive(self) -> None:
        dist.barrier()


class HostBarrier:
    """Counters in shared memory, for ranks of one host."""

    def __init__(self, page: mmap.mmap, rank: int, world_size: int) -> None:
        self._counts = memoryview(page).cast("q")
        self._mine = rank * _STRIDE
        self._all = range(0, world_size * _STRIDE, _STRIDE)
        self._turn = 0

    def arrive(self) -> None:
        self._turn += 1
        self._counts[self._mine] = self._turn
        deadline = time.monotonic() + _PATIENCE_S
        for index in self._all:
            while self._counts[index] < self._turn:
                os.sched_yield()  # there may be fewer cores than ranks
                if time.monotonic() > deadline:
                    where = place(dist.get_rank(), dist.get_world_size())
                    late = index // _STRIDE
                    raise GradSyncError(f"{where} rank {late} did not come to the gate within {_PATIENCE_S:.0f} s")

    def close(self) -> None:
        self._counts.release()


@contextmanager
def open_barrier(one_host: bool) -> Iterator[RankBarrier]:
    """A barrier for the ranks of the default group; all of them call this."""
    if not one_host:
        yield GroupBarrier()
        return
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with _page(world_size * _STRIDE * 8) as page:
        barrier = HostBarrier(page, rank, world_size)
        try:
            yield barrier
        finally:
            barrier.close()


@contextmanager
def _page(nbytes: int) -> Iterator[mmap.mmap]:
    """Zeros that all ranks see: rank 0 makes them, the others open its file descriptor."""
    own = -1
    if dist.get_rank() == 0:
        own = os.memfd_create("gradsync-barrier", os.MFD_CLOEXEC)
        os.ftruncate(own, nbytes)
    pid, fd = decide(os.getpid(), own)
    if own < 0:
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        with mmap.mmap(own, nbytes) as page:
            dist.barrier()  # rank 0's descriptor must live until everybody has it
            yield page
    finally:
        os.close(own)
