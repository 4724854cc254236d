"""When a run reached a loss: learning curves and step times, put together. Pure."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean, median
from typing import Any, NamedTuple

from slow_link.variants import EXACT, WARM_UP, WARM_UP_STEPS

_SLACK = 1.02  # times what the exact arm ends in: what one would accept

Curve = list[tuple[float, float]]  # steps, loss
Clock = Callable[[float], float]  # from steps to seconds


class Run(NamedTuple):
    """One arm's cell of one seed."""

    seed: int
    final_held_out: float
    final_train: float
    held_out: Curve
    commit: str
    machine: str


def runs_by_task(cells: dict[str, Any]) -> dict[str, dict[str, list[Run]]]:
    """By task, then by arm, as they stand in the file, then by seed; a cell's name is `task | arm | seed N`."""
    found: dict[str, dict[str, list[Run]]] = {}
    for name, cell in cells.items():
        task, arm, seed = name.split(" | ")
        curve = [(step, loss) for step, loss in cell["held_out"]]
        ends, facts = (cell["final_held_out"], cell["final_train"]), cell["machine"]
        machine = f"{facts.get('gpu', facts['cpu'])}, torch {facts['torch']}"
        run = Run(int(seed.removeprefix("seed ")), *ends, curve, cell["commit"], machine)
        found.setdefault(task, {}).setdefault(arm, []).append(run)
    return {task: {arm: sorted(runs) for arm, runs in arms.items()} for task, arms in found.items()}


def title_of(task: str) -> str:
    """With the optimizer, which a task's label leaves out where it is AdamW."""
    return task if task.endswith("sgd") else f"{task}, adamw"


def is_timed(task: str) -> bool:
    """Whether the step times are those of a task: two ranks, and the large model.

    >>> is_timed("2 replicas, large, batch 32, 1000 steps"), is_timed("8 replicas, large, 1000 steps")
    (True, False)
    """
    return task.startswith("2 ") and ", large" in task


def clock(arm: str, timed: dict[str, Any]) -> Clock | None:
    """How long an arm takes; None if it was not timed. A warm-up's steps are exact ones.

    >>> timed = {"gradsync": {"samples_s": [4.0]}, "gradsync, sign": {"samples_s": [0.5]}}
    >>> seconds = clock("gradsync, sign, warm-up", timed)
    >>> seconds(10), seconds(300)
    (40.0, 500.0)
    """
    inner = arm.removesuffix(WARM_UP)
    exact_steps = WARM_UP_STEPS if inner != arm else 0
    if inner not in timed or EXACT not in timed:
        return None
    own, exact = (median(timed[name]["samples_s"]) for name in (inner, EXACT))
    return lambda steps: exact * min(steps, exact_steps) + own * max(0.0, steps - exact_steps)


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
