"""The ring: every rank sends to the next. The least possible bytes for any number of ranks, many rounds.

Four ranks; a letter is a chunk, a capital its complete sum. Every rank sends one chunk per round.

    reduce-scatter, each adds what comes          all-gather, each keeps what comes
    round    1       2       3                    4       5       6
    0 ▶ 1    d       c       b                    A       D       C
    1 ▶ 2    a       d       c                    B       A       D
    2 ▶ 3    b       a       d                    C       B       A
    3 ▶ 0    c       b       a                    D       C       B

    n ranks: 2(n−1) rounds of 1/n of the data
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradsync.algorithms.schedule import Round, Schedule, Transfer
from gradsync.cluster import as_hosts


@dataclass(frozen=True)
class Ring:
    """The recipe that `ring()` makes."""

    def schedule(self, hosts: int | Sequence[Sequence[int]]) -> Schedule:
        """The ranks stand host after host, so that each host's border is crossed once each way."""
        ranks = [rank for host in as_hosts(hosts) for rank in host]
        blocks = [(chunk,) for chunk in range(len(ranks))]
        rounds = reduce_scatter_rounds(ranks, blocks) + all_gather_rounds(ranks, blocks)
        return Schedule(len(ranks), len(ranks), tuple(rounds))


def ring() -> Ring:
    """Every rank sends to the next: best for large data on equal links.

    >>> len(ring().schedule(4).rounds)
    6
    """
    return Ring()


def reduce_scatter_rounds(ranks: Sequence[int], blocks: Sequence[Sequence[int]]) -> list[Round]:
    """Rounds after which `ranks[i]` holds the sum over `ranks` of the chunks in `blocks[i]`."""
    return _rounds(ranks, blocks, first=-1, add=True)


def all_gather_rounds(ranks: Sequence[int], blocks: Sequence[Sequence[int]]) -> list[Round]:
    """Rounds after which all of `ranks` have `ranks[i]`'s chunks of `blocks[i]`, for every i."""
    return _rounds(ranks, blocks, first=0, add=False)


def _rounds(ranks: Sequence[int], blocks: Sequence[Sequence[int]], first: int, add: bool) -> list[Round]:
    """Every rank passes a block to the next: in turn t the block that lies `first` − t from its own."""
    n = len(ranks)
    return [
        tuple(
            Transfer(ranks[i], ranks[(i + 1) % n], chunk, add)
            for i in range(n)
            for chunk in blocks[(i + first - t) % n]
        )
        for t in range(n - 1)
    ]
