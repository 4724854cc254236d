"""The part of a long run that is drawn: neighbours together in bins, and the few most telling of many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def bins(things: Sequence[T], most: int) -> list[Sequence[T]]:
    """Neighbours together, in at most so many groups of (nearly) one size.

    >>> bins([1, 2, 3, 4, 5], 3)
    [[1, 2], [3, 4], [5]]
    >>> bins([1, 2], 3)
    [[1], [2]]
    """
    size = max(1, -(-len(things) // most))
    return [things[at : at + size] for at in range(0, len(things), size)]


def mean(values: Iterable[float]) -> float:
    """
    >>> mean([1, 3]), mean([])
    (2.0, 0.0)
    """
    kept = list(values)
    return sum(kept) / len(kept) if kept else 0.0


def quantile(values: Iterable[float], share: float) -> float:
    """The value below which about this share of them lies.

    >>> quantile([3, 1, 2], 0.5), quantile([], 0.5)
    (2, 0.0)
    """
    kept = sorted(values)
    return kept[min(len(kept) - 1, int(share * len(kept)))] if kept else 0.0


def round_up(value: float) -> float:
    """The next of 1, 2, 4, 5, 6, 8, 10 times a power of ten: where an axis ends.

    >>> round_up(0.018), round_up(37.0), round_up(0)
    (0.02, 40.0, 1.0)
    """
    if value <= 0:
        return 1.0
    power = 10.0 ** (len(f"{value:.0f}") + 1) if value >= 1 else 1.0
    while power >= value:
        power /= 10
    return next(power * step for step in (1, 2, 4, 5, 6, 8, 10) if power * step >= value * (1 - 1e-9))
