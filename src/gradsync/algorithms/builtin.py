"""All-reduces that have no schedule of ours: the backend's own (NCCL's choice, gloo's ring), and shared memory.

Ranks of one host add up in memory that all of them see, and no bytes travel at all: rank r reads part r of all n
buffers, adds in registers, and writes the sum to all n. That is 2nS bytes of memory traffic in all, where a ring over
loopback TCP copies about 11(n−1)S.

    buffer of 0  │▓▓▓▓│    │    │        rank 0 adds up column ▓ and writes it to every buffer,
    buffer of 1  │▓▓▓▓│    │    │        rank 1 the next column, rank 2 the last
    buffer of 2  │▓▓▓▓│    │    │
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Native:
    """The algorithm of `native()`, which the backend runs."""


def native() -> Native:
    """Leave the algorithm to the process group's backend.

    >>> native()
    Native()
    """
    return Native()


@dataclass(frozen=True)
class SharedMemory:
    """The algorithm of `shared_memory()`, which the ranks of one host run."""


def shared_memory() -> SharedMemory:
    """Reduce in shared memory: the fastest for the ranks of one host, and only for them.

    >>> shared_memory()
    SharedMemory()
    """
    return SharedMemory()
