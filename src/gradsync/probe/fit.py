"""Timed messages become a `Link`, and it is told how well that fits what was measured; pure.

seconds
  │                                      ·  largest size: the bandwidth
  │                          ·  ○           ○ sizes kept back, to see how well the rest foretells them
  │              ·   ○
  │ ─·──────·─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─  latency: where the first two sizes point to at 0 bytes
  └────────────────────────────────────────
    64 B         64 KB       1 MB        bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from gradsync.cluster import Link

# What a message takes beyond the latency says something about bandwidth only where it is this much of the whole.
_TELLING = 0.1
# A curve that lies this close to one bandwidth is none.
_LEVEL = 0.01
_LEAST_S = 1e-9
_MAD_TO_DEVIATION = 1.4826  # of a normal distribution


class TimedMessage(NamedTuple):
    """One timed message."""

    nbytes: float
    seconds: float
    checks: bool = False  # kept back from the fit, to check it


class FittedPoint(NamedTuple):
    """A size: what messages of it took, and what the link says they take."""

    nbytes: float
    seconds: float  # the median
    fitted_s: float
    checks: bool

    @property
    def error(self) -> float:
        """The relative error: 0.1 where the link says 10 % too much."""
        return self.fitted_s / self.seconds - 1


@dataclass(frozen=True)
class Fit:
    """A link and the points that it was made of."""

    link: Link
    points: tuple[FittedPoint, ...]

    @property
    def errors(self) -> tuple[float, ...]:
        """Relative errors, without sign: at the sizes that were kept back, or at all if none were."""
        checks = tuple(abs(point.error) for point in self.points if point.checks)
        return checks or tuple(abs(point.error) for point in self.points)

    @property
    def median_error(self) -> float:
        return median(self.errors)

    @property
    def worst_error(self) -> float:
        return max(self.errors)


def ring_message(nbytes: float, seconds: float, num_ranks: int) -> tuple[float, float]:
    """The message of one round, and its seconds, in a ring's all-reduce: 2 (n − 1) rounds of an n-th each.

    >>> ring_message(1e6, 0.12, 4)
    (250000.0, 0.02)
    """
    return nbytes / num_ranks, seconds / (2 * (num_ranks - 1))


def memory_message(nbytes: float, seconds: float) -> tuple[float, float]:
    """A message in shared memory: everything goes in and comes out once.

    >>> memory_message(1e6, 0.001)
    (1000000.0, 0.0005)
    """
    return nbytes, seconds / 2


def fit(samples: Sequence[TimedMessage], load: float = 0.0) -> Fit:
    """The link that these messages tell of; at least two sizes must not be kept back.

    >>> wire = Link(latency_s=50e-6, bandwidth=125e6)
    >>> found = fit([TimedMessage(nbytes, wire.seconds(nbytes)) for nbytes in (64, 1e3, 1e5, 1e6)])
    >>> round(1e6 * found.link.latency_s, 3), round(found.link.bandwidth / 1e6, 3), found.link.curve
    (50.0, 125.0, ())
    """
    medians = _rising(_medians([sample for sample in samples if not sample.checks]))
    if len(medians) < 2:
        raise ValueError(f"a link needs messages of at least 2 sizes, got {[nbytes for nbytes, _ in medians]}")
    latency_s = _latency(medians)
    curve = _curve(medians, latency_s)
    bandwidth = curve[-1][1]
    level = all(abs(rate / bandwidth - 1) <= _LEVEL for _, rate in curve)
    bare = Link(latency_s, bandwidth, () if level else curve)
    spread = _spread(samples, bare)
    link = Link(latency_s, bandwidth, bare.curve, load, spread)
    return Fit(link, _points(samples, link))


def _medians(samples: Sequence[TimedMessage]) -> list[tuple[float, float]]:
    """Seconds by rising size."""
    by_size: dict[float, list[float]] = {}
    for sample in samples:
        by_size.setdefault(sample.nbytes, []).append(sample.seconds)
    return [(nbytes, median(by_size[nbytes])) for nbytes in sorted(by_size)]


def _rising(medians: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """A larger message never takes less: where it seems so, the smaller one was disturbed.

    >>> _rising([(1, 5.0), (2, 3.0), (4, 6.0)])
    [(1, 3.0), (2, 3.0), (4, 6.0)]
    """
    seconds = [s for _, s in medians]
    return [(nbytes, min(seconds[index:])) for index, (nbytes, _) in enumerate(medians)]


def _latency(medians: list[tuple[float, float]]) -> float:
    (small, small_s), (next_, next_s) = medians[:2]
    intercept = (small_s * next_ - next_s * small) / (next_ - small)
    return min(max(intercept, 0.0), min(seconds for _, seconds in medians))


def _curve(medians: list[tuple[float, float]], latency_s: float) -> tuple[tuple[float, float], ...]:
    """Bytes per second where they can be told from the latency; of the largest message in any case."""
    telling = [(nbytes, s - latency_s) for nbytes, s in medians if s - latency_s >= _TELLING * s]
    if not telling or telling[-1][0] < medians[-1][0]:
        telling.append((medians[-1][0], medians[-1][1] - latency_s))
    return tuple((nbytes, nbytes / max(seconds, _LEAST_S)) for nbytes, seconds in telling)


def _spread(samples: Sequence[TimedMessage], link: Link) -> float:
    """The spread of messages that take longer than the latency, if any do: those are what a step waits for.

    By the median deviation: a single message that took ten times as long says little of the others.
    """
    long = [sample for sample in samples if link.seconds(sample.nbytes) >= 2 * link.latency_s]
    deviations = [abs(s.seconds / max(link.seconds(s.nbytes), _LEAST_S) - 1) for s in long or samples]
    return _MAD_TO_DEVIATION * median(deviations)


def _points(samples: Sequence[TimedMessage], link: Link) -> tuple[FittedPoint, ...]:
    checks = {sample.nbytes for sample in samples if sample.checks}
    return tuple(
        FittedPoint(nbytes, seconds, link.seconds(nbytes), nbytes in checks) for nbytes, seconds in _medians(samples)
    )
