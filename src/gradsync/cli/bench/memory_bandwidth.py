"""The bandwidth of the host's memory, measured in the same run, and a way to empty its caches.

An all-reduce in place of S bytes on n ranks reads and writes each rank's bytes at least once, 2nS in all. At
the B bytes per second that n processes at once can move, that takes 2nS / B: the bound. Data that stays in a
cache may beat it.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from gradsync.cli.bench.hardware import last_level_cache_nbytes
from gradsync.cli.bench.rank_barrier import RankBarrier

_LEAST_NBYTES = 64 * 2**20
_PASSES = 8


def sweep_nbytes() -> int:
    """More than the last level of caches holds."""
    return max(_LEAST_NBYTES, 2 * last_level_cache_nbytes())


def make_sweep(device: str) -> torch.Tensor:
    """A buffer that, once walked through, has pushed everything else out of the caches."""
    return torch.ones(sweep_nbytes() // 4, device=device)


def memory_bandwidth(barrier: RankBarrier, buffer: torch.Tensor) -> float:
    """Bytes per second that all ranks of the host together read and write: the best of several passes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = torch.empty(_PASSES, dtype=torch.float64)
    for index in range(_PASSES):
        barrier.arrive()
        start = time.perf_counter()
        buffer.neg_()
        seconds[index] = time.perf_counter() - start
    torch.set_num_threads(threads)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return 2 * buffer.nbytes * dist.get_world_size() / float(seconds.min())


def bound_s(nbytes: int, ranks: int, bandwidth: float) -> float:
    """The least seconds for an all-reduce in place on one host whose data is in memory.

    >>> bound_s(10**9, ranks=2, bandwidth=2e10)
    0.2
    """
    return 2 * ranks * nbytes / bandwidth
