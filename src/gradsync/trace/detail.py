"""Which steps are told bucket by bucket: a few of many, the same on all ranks, and in step with nothing.

steps      0 … 49   │ 50 … 59    │ 60 … 69    │ 70 … 79    │ 80 … 89    │
detailed   all      │ •          │    •       │ •          │          • │   one of each ten, by a hash

Every tenth would coincide with whatever training does every 10, 20 or 100 steps: validation, a checkpoint, a log line.
A hash needs no state, and all ranks choose alike.
"""

from __future__ import annotations

FIRST = 50  # steps after attach: all of them
ONE_IN = 10

_MASK = (1 << 64) - 1
_OF_GRADIENTS = 0x5851F42D  # so that the tens are chosen apart from the steps in them


def is_detailed(step: int) -> bool:
    """One step of each ten.

    >>> [step for step in range(50, 110) if is_detailed(step)]
    [50, 63, 70, 89, 90, 101]
    """
    return step % ONE_IN == _spread(step // ONE_IN) % ONE_IN


def is_rare(step: int) -> bool:
    """One step of each hundred, and a detailed one: for what is too dear for one in ten.

    >>> [step for step in range(1000) if is_rare(step)][:5]
    [5, 194, 260, 391, 400]
    """
    ten = step // ONE_IN
    return is_detailed(step) and ten % ONE_IN == _spread(ten // ONE_IN + _OF_GRADIENTS) % ONE_IN


def _spread(number: int) -> int:
    """Neighbours become numbers that have nothing to do with each other (the finalizer of splitmix64)."""
    mixed = (number + 1) * 0x9E3779B97F4A7C15 & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31
