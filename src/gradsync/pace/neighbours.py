"""Who sends to whom in a round of gossip. Pure.

    ring            0 ▶ 1 ▶ 2 ▶ 3 ▶ 0                  every round the same
    exponential     rank ▶ rank + 1, + 2, + 4, …       a stride of its own in each of ⌈log₂ n⌉ rounds, and again

In every round each rank sends to exactly one and receives from exactly one. On the ring a rank has heard of all others
after n − 1 rounds, but of the ranks of a host only the last sends to another one. With the exponential strides
⌈log₂ n⌉ rounds are enough, and where n is a power of two they make the exact mean.
"""

from __future__ import annotations

from typing import NamedTuple

from gradsync.paces import Topology


class Neighbours(NamedTuple):
    """Of one rank in one round, by index in the group."""

    receiver: int  # gets half of what we hold
    sender: int  # gives us half of what it holds

    @property
    def peers(self) -> list[int]:
        """Both, once each: of two ranks the other is both."""
        return sorted(set(self))


def neighbours(topology: Topology, rank: int, size: int, number: int) -> Neighbours:
    """Those of `rank` in the round with this number, among at least two ranks.

    >>> neighbours("ring", 0, 8, number=5)
    Neighbours(receiver=1, sender=7)
    >>> [neighbours("exponential", 0, 8, number).receiver for number in range(4)]
    [1, 2, 4, 1]
    """
    stride = 1 if topology == "ring" else 1 << number % num_strides(size)
    return Neighbours((rank + stride) % size, (rank - stride) % size)


def num_strides(size: int) -> int:
    """How many strides the exponential topology has among so many ranks: ⌈log₂ size⌉, without rounding.

    >>> [num_strides(size) for size in (2, 3, 4, 5, 64)]
    [1, 2, 2, 3, 6]
    """
    return (size - 1).bit_length()
