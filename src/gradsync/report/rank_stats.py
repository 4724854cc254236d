"""The facts that ranks' own `stats()` add to their steps: compression's error, staleness, predictions, probed links."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from gradsync.trace.reader import RunTrace


@dataclass(frozen=True)
class RankStats:
    """The numbers of all ranks together; None where no rank gave one."""

    predicted_step_s: float | None
    link_bandwidth: float | None  # bytes per second, from a probe
    audit_error: float | None  # |what arrived − the exact mean| / |the exact mean|, the worst rank's
    audit_cosine: float | None
    staleness_mean: float | None
    staleness_max: float | None
    staleness_bound: float | None
    waited_s: float | None  # of an asynchronous pace, since attach: it makes no collectives


def read_rank_stats(run: RunTrace) -> RankStats:
    """The last that each rank said."""
    return RankStats(
        predicted_step_s=_expected(run, "predicted_step_s"),
        link_bandwidth=_expected(run, "link_bandwidth"),
        audit_error=_of(run, "audit_error", max),
        audit_cosine=_of(run, "audit_cosine", min),
        staleness_mean=_of(run, "staleness_mean", max),
        staleness_max=_of(run, "staleness_max", max),
        staleness_bound=_of(run, "staleness_bound", max),
        waited_s=_of(run, "waited_s", median),
    )


def choice_of(run: RunTrace) -> int | None:
    """The step from which `gs.auto()` runs with the plan that it chose last; None if it chose none."""
    steps = [trace.choices[-1].step for trace in run.ranks.values() if trace.choices]
    return max(steps, default=None)


def _expected(run: RunTrace, key: str) -> float | None:
    """Return what was expected of the plan that runs now: a choice is written at once, stats now and then."""
    values = [value for rank in run.ranks if (value := _expected_of(run, rank, key)) is not None]
    return median(values) if values else None


def _expected_of(run: RunTrace, rank: int, key: str) -> float | None:
    trace = run.ranks[rank]
    choice = trace.choices[-1] if trace.choices else None
    if choice is not None and (not trace.stats or trace.stats[-1].step < choice.step):
        value = getattr(choice, key)
        return float(value) if value is not None and value >= 0 else None
    return _last(run, rank, key)


def _of(run: RunTrace, key: str, together: Callable[[Iterable[float]], float]) -> float | None:
    values = [value for value in (_last(run, rank, key) for rank in run.ranks) if value is not None]
    return together(values) if values else None


def _last(run: RunTrace, rank: int, key: str) -> float | None:
    for line in reversed(run.ranks[rank].stats):
        if key in line.stats:
            value = line.stats[key]
            return float(value) if isinstance(value, int | float) and value >= 0 else None
    return None
