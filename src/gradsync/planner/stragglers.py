"""The cost of waiting for the slowest rank: nobody can go on before the last one is there."""

from __future__ import annotations

import math
from functools import lru_cache

# Beyond ten standard deviations on either side nothing is left, also of a million ranks; the integrand is smooth and
# flat at both ends, so the trapezoid rule with this step is right to more digits than anybody measures.
_EDGE = 10.0
_STEP = 0.05


@lru_cache(maxsize=256)
def expected_max(n: int) -> float:
    """Return by how many standard deviations the largest of `n` independent normal values exceeds the mean, on average.

    By parts, with Φ the distribution of one: the mean of the largest is edge − ∫ Φ(x)ⁿ dx up to that edge.

    >>> [round(expected_max(n), 4) for n in (1, 2, 8, 64)]
    [0.0, 0.5642, 1.4236, 2.3437]
    """
    if n < 1:
        raise ValueError(f"expected_max: n must be a number of ranks of at least 1, got {n!r}")
    points = [-_EDGE + index * _STEP for index in range(round(2 * _EDGE / _STEP) + 1)]
    inner = sum(_all_below(x, n) for x in points[1:-1])
    ends = (_all_below(points[0], n) + _all_below(points[-1], n)) / 2
    return max(0.0, _EDGE - _STEP * (inner + ends))


def straggler_s(compute_s: float, jitter: float, n: int, steps: int = 1) -> float:
    """Seconds per step that a rank waits for the slowest of `n`, on average.

    Args:
        compute_s: A step's computation.
        jitter: Its relative standard deviation, from step to step and from rank to rank.
        n: How many ranks wait for each other.
        steps: How many steps lie between two meetings: fast and slow ones average out, so that a step of k waits 1/√k
            as long.

    >>> round(straggler_s(0.1, 0.05, 8), 6), round(straggler_s(0.1, 0.05, 8, steps=4), 6)
    (0.007118, 0.003559)
    """
    if steps < 1:
        raise ValueError(f"straggler_s: steps must be a whole number of at least 1, got {steps!r}")
    if jitter < 0:
        raise ValueError(f"straggler_s: jitter must be a relative deviation, 0 or more, got {jitter!r}")
    return compute_s * jitter * expected_max(n) / math.sqrt(steps)


def _all_below(x: float, n: int) -> float:
    """Φ(x)ⁿ, by the small one of Φ and 1 − Φ."""
    if x < 0:
        return (math.erfc(-x / math.sqrt(2)) / 2) ** n
    return math.exp(n * math.log1p(-math.erfc(x / math.sqrt(2)) / 2))
