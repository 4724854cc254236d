"""The step to show of many: one at the median, and of those recorded bucket by bucket the latest, if one is there."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from gradsync.report.table import Table
from gradsync.trace.lines import StepLine

_WINDOW = 200  # steps: a picture shows how it goes now
_NEAR = 0.1  # of the median
_MIDDLE = (0.4, 0.6)  # of the steps are shorter: equally good, and so the latest is taken, for runs change
_QUARTER = 0.25  # of the steps are shorter, and as many longer: between them a step is as most are


class TypicalStep(NamedTuple):
    """A step, and how it stands among the last ones."""

    step: int
    step_s: float
    median_s: float
    shorter: float  # the share of them that are shorter; of those equally long half
    num_steps: int
    num_detailed: int  # recorded bucket by bucket
    detailed: bool  # whether this one is
    latest: bool  # of several near the median; else it is the nearest
    nearest_detailed: tuple[int, float] | None  # and if it is not: the one nearest to the median, and its length


def typical_step(table: Table) -> TypicalStep | None:
    """The typical one of the last 200 steps that count; None if there is none."""
    lengths = _lengths(table)
    if not lengths:
        return None
    middle_s = median(lengths.values())
    detailed = {step: step_s for step, step_s in lengths.items() if _is_detailed(table.rows[step])}
    alike = _in_the_middle(detailed, lengths, middle_s)
    near = max(alike, default=_nearest(detailed, middle_s))
    found = _nearest(lengths, middle_s) if near is None or not _is_usual(lengths[near], lengths, middle_s) else near
    assert found is not None
    return TypicalStep(
        found, lengths[found], middle_s, _shorter(lengths[found], lengths), len(lengths), len(detailed),
        found in detailed, found in alike, None if near is None or found in detailed else (near, lengths[near]),
    )  # fmt: skip


def _lengths(table: Table) -> dict[int, float]:
    """The length of each of the last steps that at least half of the ranks have written; of any kind if none counts."""
    for steps in (table.judged(), table.steps):
        whole = [
            step
            for step in steps
            if 2 * sum(bool(cell.phases) for cell in table.rows[step].values()) >= len(table.ranks)
        ]
        if whole:
            return {step: median(cell.step_s for cell in table.rows[step].values()) for step in whole[-_WINDOW:]}
    return {}


def _is_detailed(row: Mapping[int, StepLine]) -> bool:
    """Return whether most ranks recorded the step bucket by bucket."""
    return 2 * sum(cell.buckets is not None for cell in row.values()) >= len(row)


def _in_the_middle(detailed: Mapping[int, float], lengths: Mapping[int, float], middle_s: float) -> list[int]:
    low, high = _MIDDLE
    near = {step: step_s for step, step_s in detailed.items() if abs(step_s - middle_s) <= _NEAR * middle_s}
    return [step for step, step_s in near.items() if low <= _shorter(step_s, lengths) <= high]


def _nearest(lengths: Mapping[int, float], middle_s: float) -> int | None:
    """The nearest step, and of equally near ones the latest."""
    return min(lengths, key=lambda step: (abs(lengths[step] - middle_s), -step), default=None)


def _is_usual(step_s: float, lengths: Mapping[int, float], middle_s: float) -> bool:
    return abs(step_s - middle_s) <= _NEAR * middle_s or _QUARTER <= _shorter(step_s, lengths) <= 1 - _QUARTER


def _shorter(step_s: float, lengths: Mapping[int, float]) -> float:
    """
    >>> _shorter(2.0, {1: 1.0, 2: 2.0, 3: 3.0, 4: 2.0})
    0.5
    """
    below = sum(other < step_s for other in lengths.values()) + 0.5 * sum(other == step_s for other in lengths.values())
    return below / len(lengths)
