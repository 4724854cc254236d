"""First inside each host, then across: each host sends the least possible bytes over its border.

Two hosts of two ranks; each local rank answers for a share, each share has a chunk per host.

    inside: reduce-scatter         across: all-reduce of each share     inside: all-gather
    host A   0 ⇄ 1                 0 ─────┐ share 0    1 ─────┐ share 1    0 ⇄ 1
    host B   2 ⇄ 3                 2 ─────┘            3 ─────┘            2 ⇄ 3

With m hosts of g ranks, α1, β1 inside and α2, β2 of the one NIC of each host, S bytes take

    2(g−1) α1 + 2(m−1) α2 + 2(g−1)/g · S β1 + 2(m−1)/m · S β2 + (n−1)/n · S γ

Hosts may differ in size: shares are then cut finer, a rank of a small host answers for more of them, and
small hosts wait in the rounds inside for larger ones. A host's border always carries 2(m−1)/m · S.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradsync.algorithms.ring import all_gather_rounds, reduce_scatter_rounds
from gradsync.algorithms.schedule import Round, Schedule, chunk_bounds, side_by_side
from gradsync.cluster import Hosts, as_hosts

_FINEST = 4  # shares per rank of the largest host; no rank then answers for over 1/4 more than an equal part


class Levels(NamedTuple):
    """The three parts of the algorithm, each between the ranks it concerns."""

    world_size: int
    num_chunks: int
    blocks: dict[int, range]  # the chunks that each rank answers for, consecutive inside a host
    scatter: tuple[Round, ...]  # inside: after it each rank has its host's sum of its block
    across: tuple[Round, ...]  # after it each rank has everybody's sum of its block
    gather: tuple[Round, ...]  # inside: after it each rank has all of it

    def schedule(self) -> Schedule:
        """The three parts, one after the other."""
        return Schedule(self.world_size, self.num_chunks, self.scatter + self.across + self.gather)

    def across_schedule(self) -> Schedule:
        """Return only what travels between hosts, for where the ranks of a host have a faster way among themselves."""
        return Schedule(self.world_size, self.num_chunks, self.across)


@dataclass(frozen=True)
class Hierarchical:
    """The recipe that `hierarchical()` makes."""

    def schedule(self, hosts: int | Sequence[Sequence[int]]) -> Schedule:
        """Rings inside the hosts, then for each share a ring of those who answer for it, then rings inside."""
        return self.levels(hosts).schedule()

    def levels(self, hosts: int | Sequence[Sequence[int]]) -> Levels:
        """The schedule part by part."""
        hosts = as_hosts(hosts)
        m, num_shares = len(hosts), _num_shares(hosts)
        shares_of = [[range(*bounds) for bounds in chunk_bounds(num_shares, len(host))] for host in hosts]
        blocks_of = [[range(s.start * m, s.stop * m) for s in shares] for shares in shares_of]
        inside = list(zip(hosts, blocks_of, strict=True))
        across = [
            (_answering(hosts, shares_of, share), [(share * m + part,) for part in range(m)])
            for share in range(num_shares)
        ]
        between = [
            *side_by_side(reduce_scatter_rounds(ranks, blocks) for ranks, blocks in across),
            *side_by_side(all_gather_rounds(ranks, blocks) for ranks, blocks in across),
        ]
        return Levels(
            world_size=sum(map(len, hosts)),
            num_chunks=num_shares * m,
            blocks={rank: block for ranks, blocks in inside for rank, block in zip(ranks, blocks, strict=True)},
            scatter=tuple(side_by_side(reduce_scatter_rounds(ranks, blocks) for ranks, blocks in inside)),
            across=tuple(between),
            gather=tuple(side_by_side(all_gather_rounds(ranks, blocks) for ranks, blocks in inside)),
        )


def hierarchical() -> Hierarchical:
    """Sum inside each host, then across: best where hosts are joined by slower links than ranks of one host.

    >>> len(hierarchical().schedule([[0, 1, 2], [3, 4, 5]]).rounds)
    6
    """
    return Hierarchical()


def _num_shares(hosts: Hosts) -> int:
    """Enough that every host can deal them out evenly, or nearly so where that would be too many."""
    sizes = [len(host) for host in hosts]
    return min(math.lcm(*sizes), _FINEST * max(sizes))


def _answering(hosts: Hosts, shares_of: list[list[range]], share: int) -> list[int]:
    """The rank on each host that answers for the share."""
    return [
        next(rank for rank, mine in zip(host, shares, strict=True) if share in mine)
        for host, shares in zip(hosts, shares_of, strict=True)
    ]
