"""The packing of gradients that travel together: the order is cut into buckets of like ones, for engine and planner."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

_MIN_NBYTES, _MAX_NBYTES, _NUM_BUCKETS = 4 << 20, 25 << 20, 8

Kind = TypeVar("Kind", bound=Hashable)


def default_limit(total_nbytes: int) -> int:
    """An eighth of the model, 4 to 25 MiB: enough buckets to overlap, each large enough to be worth a message.

    >>> default_limit(80 << 20) >> 20, default_limit(1 << 30) >> 20
    (10, 25)
    """
    return min(max(total_nbytes // _NUM_BUCKETS, _MIN_NBYTES), _MAX_NBYTES)


def pack(items: Iterable[tuple[Kind, int]], limit: float) -> list[tuple[list[int], Kind]]:
    """Cut a sequence of (kind, bytes) into buckets of one kind, each closed when it reaches `limit` bytes.

    Buckets, as the numbers of their items, stand in the order in which they get full.

    >>> pack([("a", 6), ("b", 6), ("a", 6), ("a", 1)], limit=10)
    [([0, 2], 'a'), ([1], 'b'), ([3], 'a')]
    """
    closed: list[tuple[list[int], Kind]] = []
    open_: dict[Kind, list[int]] = {}
    nbytes: dict[Kind, int] = {}
    for number, (kind, size) in enumerate(items):
        open_.setdefault(kind, []).append(number)
        nbytes[kind] = nbytes.get(kind, 0) + size
        if nbytes[kind] >= limit:
            closed.append((open_.pop(kind), kind))
            nbytes[kind] = 0
    return closed + [(group, kind) for kind, group in open_.items()]
