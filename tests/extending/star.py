# An all-reduce from outside of gradsync: all send to the first rank, which adds up and sends back.
from collections.abc import Sequence
from dataclasses import dataclass

from gradsync.algorithms.schedule import Schedule, Transfer
from gradsync.cluster import as_hosts


@dataclass(frozen=True)
class Star:
    """Two rounds, and all bytes through one rank."""

    def schedule(self, hosts: int | Sequence[Sequence[int]]) -> Schedule:
        first, *others = (rank for host in as_hosts(hosts) for rank in host)
        there = tuple(Transfer(rank, first, chunk=0, add=True) for rank in others)
        back = tuple(Transfer(first, rank, chunk=0, add=False) for rank in others)
        return Schedule(1 + len(others), 1, (there, back))
