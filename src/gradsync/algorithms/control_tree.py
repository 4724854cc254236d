"""The tree by which ranks agree: subgroups of a few ranks, one of each in the next subgroup up.

    level 2                15 ─ 0 ─ 128 ─ 256 …            who leads is none of those that lead below
    level 1            0 ─ 8 ─ 16 ─ … ─ 120   128 ─ …      first ranks of hosts, `FAN_OUT` to a subgroup
    level 0     0 1 2 3 4 5 6 7   8 9 …       128 129 …    the ranks of a host

What a rank says, hears and connects to in a step does not grow with the number of ranks, and the way up and down is as
long as its logarithm. All of it follows from who shares a host, so every rank builds the same tree by itself. Pure.

Note [Who leads]
    A rank that led on all levels would do more in a step the more ranks there are. So a subgroup from level 2 on is led
    by the first rank of a host that leads no other one: the last host below the first of its members. Between the hosts
    of one member and those of the next there is one such place for every subgroup, so no host is taken twice. It joins
    them as one more, and brings no word of its own, for it has said that on level 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeVar

from gradsync.cluster import Hosts

T = TypeVar("T")

FAN_OUT = 16  # hosts in a subgroup
MAX_LOCAL = 64  # ranks of one host in a subgroup
# A gather of gloo's goes round in a ring: with more ranks that is no shorter than the way up and down.
MOST_GATHERED = 3


class Subgroup(NamedTuple):
    """Ranks that tell each other something, by index in the group; the first one leads, and speaks for all below it."""

    level: int
    members: tuple[int, ...]
    listens: bool = False  # whether who leads only hears the others: see [Who leads]

    @property
    def leader(self) -> int:
        return self.members[0]


class _Branch(NamedTuple):
    """Hosts in a row that have come together so far."""

    speaker: int
    last: int  # the first rank of the last host among them


class ControlTree:
    """All subgroups; each rank takes part in those of `climb(rank)`, from the bottom."""

    def __init__(self, hosts: Hosts, fan_out: int | None = None) -> None:
        """`fan_out` is the number of hosts in a subgroup, where it is not the usual one."""
        fan_out = FAN_OUT if fan_out is None else fan_out
        if fan_out < 2:
            raise ValueError(f"a subgroup has at least 2 members, got fan_out={fan_out}")
        self.hosts = hosts
        parts = [tuple(part) for host in hosts for part in _chunks(host, MAX_LOCAL)]
        self.levels = [tuple(Subgroup(0, part) for part in parts if len(part) > 1)]
        branches = [_Branch(part[0], part[0]) for part in parts]
        while len(branches) > 1:
            joined = [_join(len(self.levels), together) for together in _chunks(branches, fan_out)]
            self.levels.append(tuple(subgroup for subgroup, _ in joined if subgroup is not None))
            branches = [branch for _, branch in joined]
        self.root = branches[0].speaker  # hears everything first
        self._subgroup_of: dict[tuple[int, int], Subgroup] = {
            (subgroup.level, rank): subgroup
            for subgroups in self.levels
            for subgroup in subgroups
            for rank in subgroup.members
        }

    def climb(self, rank: int) -> list[Subgroup]:
        """The subgroups of one rank from the bottom, five at most.

        >>> ControlTree(((0, 1), (2, 3), (4,))).climb(2)
        [Subgroup(level=0, members=(2, 3), listens=False), Subgroup(level=1, members=(0, 2, 4), listens=False)]
        >>> [subgroup.members for subgroup in ControlTree(((0,), (1,), (2,), (3,)), fan_out=2).climb(1)]
        [(0, 1), (1, 0, 2)]
        """
        found = (self._subgroup_of.get((level, rank)) for level in range(len(self.levels)))
        return [subgroup for subgroup in found if subgroup is not None]

    def below(self, rank: int, level: int) -> tuple[int, ...]:
        """The ranks for which `rank` speaks in its subgroup of this level: the order in which their rows come up.

        >>> ControlTree(((0, 1), (2, 3), (4,))).below(2, 1), ControlTree(((0, 1), (2, 3), (4,))).below(0, 2)
        ((2, 3), (0, 1, 2, 3, 4))
        """
        subgroup = self._subgroup_of.get((level, rank))
        if subgroup is not None and subgroup.listens and subgroup.leader == rank:
            return ()
        if level == 0:
            return (rank,)
        lower = self._subgroup_of.get((level - 1, rank))
        if lower is None:
            return self.below(rank, level - 1)  # alone there
        return tuple(each for member in lower.members for each in self.below(member, level - 1))

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
    ([], [12], [16, 17, 9])
    """
    sizes: list[int] = []
    while num_hosts > 1:
        num_subgroups = -(-num_hosts // FAN_OUT)
        sizes.append(-(-num_hosts // num_subgroups) + (1 if sizes else 0))  # see [Who leads]
        num_hosts = num_subgroups
    return sizes


def hops(size: int) -> int:
    """The messages, one after the other, by which a subgroup hears and is told: to its first rank, then a binary tree.

    >>> [hops(size) for size in (2, 3, 16)]
    [2, 3, 5]
    """
    return 1 + (size - 1).bit_length()


def _join(level: int, branches: list[_Branch]) -> tuple[Subgroup | None, _Branch]:
    """A subgroup of the branches' speakers, and the one branch that they are from then on: see [Who leads]."""
    first, last = branches[0], branches[-1].last
    if len(branches) == 1:
        return None, first  # alone here: it speaks for itself one level up
    speakers = tuple(branch.speaker for branch in branches)
    listens = first.last != first.speaker
    return Subgroup(level, (first.last, *speakers) if listens else speakers, listens), _Branch(first.last, last)


def _chunks(members: Sequence[T], size: int) -> list[list[T]]:
    """Consecutive parts of nearly equal length, none longer than `size`."""
    count = -(-len(members) // size)
    ends = [len(members) * number // count for number in range(count + 1)]
    return [list(members[begin:end]) for begin, end in pairwise(ends)]
