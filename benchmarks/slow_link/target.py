"""When a run reached a loss: learning curves and step times, put together. Pure."""

from __future__ import annotations

from statistics import mean
from typing import Any, NamedTuple

from slow_link.arms import EXACT

_SLACK = 1.02  # times what the exact arm ends in: what one would accept

Curve = list[tuple[float, float]]  # steps, loss


class Run(NamedTuple):
    """One arm's cell of one seed."""

    seed: int
    final_held_out: float
    final_train: float
    held_out: Curve


def runs_by_task(cells: dict[str, Any]) -> dict[str, dict[str, list[Run]]]:
    """By task, then by arm, as they stand in the file; a cell's name is `task | arm | seed N`."""
    found: dict[str, dict[str, list[Run]]] = {}
    for name, cell in cells.items():
        task, arm, seed = name.split(" | ")
        curve = [(step, loss) for step, loss in cell["held_out"]]
        run = Run(int(seed.removeprefix("seed ")), cell["final_held_out"], cell["final_train"], curve)
        found.setdefault(task, {}).setdefault(arm, []).append(run)
    return found


def target_of(arms: dict[str, list[Run]]) -> float | None:
    """The loss to reach: a little above what exact averaging ends in."""
    exact = arms.get(EXACT, [])
    return _SLACK * mean(run.final_held_out for run in exact) if exact else None


def reached_at(curve: Curve, target: float) -> float | None:
    """The step at which a curve first came down to `target`, on straight lines between its points; None: never.

    >>> reached_at([(50, 3.0), (100, 2.0)], 2.5)
    75.0
    """
    before: tuple[float, float] | None = None
    for step, loss in curve:
        if loss <= target:
            if before is None or before[1] == loss:
                return float(step)
            share = (before[1] - target) / (before[1] - loss)
            return before[0] + share * (step - before[0])
        before = (step, loss)
    return None


def mean_curve(runs: list[Run]) -> Curve:
    """Over the seeds."""
    return [(same[0][0], mean(loss for _, loss in same)) for same in zip(*(run.held_out for run in runs), strict=True)]
