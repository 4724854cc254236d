"""The tree by which ranks agree: subgroups of a few ranks, the first of each in the next subgroup up.

    level 2                 0 ──────────── 32
    level 1            0 ─ 8 ─ 16 ─ 24    32 ─ 40 …        first ranks of hosts, `FAN_OUT` to a subgroup
    level 0     0 1 2 3 4 5 6 7   8 9 …   32 33 …          the ranks of a host

A rank belongs to one subgroup, and who leads it to one more, and so on: what a rank says, hears and connects to in a
step does not grow with the number of ranks, and the way up and down is as long as its logarithm. All of it follows
from who shares a host, so every rank builds the same tree by itself. Pure.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from gradsync.cluster import Hosts

FAN_OUT = 16  # hosts in a subgroup
MAX_LOCAL = 64  # ranks of one host in a subgroup
MOST_GATHERED = (
    3  # a gather of gloo's goes round in a ring: with more ranks that is no shorter than the way up and down
)


class Subgroup(NamedTuple):
    """Ranks that tell each other something, by index in the group; the first one leads, and speaks for all below it."""

    level: int
    members: tuple[int, ...]

    @property
    def leader(self) -> int:
        return self.members[0]


class ControlTree:
    """All subgroups; each rank climbs through those it is in, from `climb(rank)[0]` on."""

    def __init__(self, hosts: Hosts, fan_out: int | None = None) -> None:
        """`fan_out` is the number of hosts in a subgroup, where it is not the usual one."""
        fan_out = FAN_OUT if fan_out is None else fan_out
        if fan_out < 2:
            raise ValueError(f"a subgroup has at least 2 members, got fan_out={fan_out}")
        self.hosts = hosts
        level, groups = 0, [part for host in hosts for part in _chunks(host, MAX_LOCAL)]
        self.levels: list[tuple[Subgroup, ...]] = []
        while True:
            self.levels.append(tuple(Subgroup(level, members) for members in groups if len(members) > 1))
            if len(groups) == 1:
                break
            level, groups = level + 1, _chunks(tuple(group[0] for group in groups), fan_out)
        self._subgroup_of: dict[tuple[int, int], Subgroup] = {
            (subgroup.level, rank): subgroup
            for subgroups in self.levels
            for subgroup in subgroups
            for rank in subgroup.members
        }

    @property
    def root(self) -> int:
        """The rank that hears everything first."""
        return self.hosts[0][0]

    def climb(self, rank: int) -> list[Subgroup]:
        """The subgroups of one rank from the bottom: it leads all but the last, and the root leads that too.

        >>> ControlTree(((0, 1), (2, 3), (4,))).climb(2)
        [Subgroup(level=0, members=(2, 3)), Subgroup(level=1, members=(0, 2, 4))]
        >>> ControlTree(((0, 1), (2, 3), (4,))).climb(3)
        [Subgroup(level=0, members=(2, 3))]
        """
        found: list[Subgroup] = []
        for level in range(len(self.levels)):
            subgroup = self._subgroup_of.get((level, rank))
            if subgroup is None:
                continue  # alone here: it speaks for itself one level up
            found.append(subgroup)
            if subgroup.leader != rank:
                break
        return found

    def below(self, rank: int, level: int) -> tuple[int, ...]:
        """The ranks for which `rank` speaks in its subgroup of this level: the order in which their rows come up.

        >>> ControlTree(((0, 1), (2, 3), (4,))).below(2, 1), ControlTree(((0, 1), (2, 3), (4,))).below(0, 2)
        ((2, 3), (0, 1, 2, 3, 4))
        """
        if level == 0:
            return (rank,)
        subgroup = self._subgroup_of.get((level - 1, rank))
        members = subgroup.members if subgroup is not None else (rank,)
        return tuple(each for member in members for each in self.below(member, level - 1))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The ranks, all of them, in the order in which their rows arrive at the root."""
        return self.below(self.root, len(self.levels))

    @cached_property
    def in_order(self) -> bool:
        """True if rows arrive at the root in the order of ranks: each host has ranks in a row."""
        return self.order == tuple(range(len(self.order)))

    @cached_property
    def is_small(self) -> bool:
        """True if ranks are so few that each may as well hear each: one message then comes sooner than two."""
        return sum(map(len, self.hosts)) <= MOST_GATHERED and self.depth == 1

    @property
    def depth(self) -> int:
        """The number of subgroups that lie one above the other."""
        return sum(1 for subgroups in self.levels if subgroups)


def subgroup_sizes(num_hosts: int) -> list[int]:
    """Return how many members the largest subgroup has, level by level, where so many hosts agree.

    >>> subgroup_sizes(1), subgroup_sizes(12), subgroup_sizes(2048)
    ([], [12], [16, 16, 8])
    """
    sizes = []
    while num_hosts > 1:
        num_subgroups = -(-num_hosts // FAN_OUT)
        sizes.append(-(-num_hosts // num_subgroups))
        num_hosts = num_subgroups
    return sizes


def hops(size: int) -> int:
    """The messages, one after the other, by which a subgroup hears and is told: to its first rank, then a binary tree.

    >>> [hops(size) for size in (2, 3, 16)]
    [2, 3, 5]
    """
    return 1 + (size - 1).bit_length()


def _chunks(members: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    """Consecutive parts of nearly equal length, none longer than `size`."""
    count = -(-len(members) // size)
    ends = [len(members) * number // count for number in range(count + 1)]
    return [members[begin:end] for begin, end in pairwise(ends)]
