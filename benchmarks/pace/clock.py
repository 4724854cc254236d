"""Learning curves by steps, put together with seconds and bytes per step. Pure."""

from __future__ import annotations

from statistics import median
from typing import Any

from pace.variants import LINK, NUM_RANKS, PEER, SHAPE, VARIANTS
from slow_link.store import Results
from slow_link.target import Curve, Run, mean_curve, reached_at, runs_by_task

SAMPLES_PER_STEP = NUM_RANKS * SHAPE.batch

Timed = dict[str, Any]


def tasks_of(results: Results) -> dict[str, dict[str, list[Run]]]:
    """What was learned, by task and arm; the task of most steps last."""
    found = runs_by_task(results.get("learn", {}))
    return {task: found[task] for task in sorted(found, key=steps_of)}


def steps_of(task: str) -> int:
    """
    >>> steps_of("1000 steps")
    1000
    """
    return int(task.split()[0])


def timed_of(results: Results, rate: str = LINK) -> Timed:
    """What steps cost at that rate, by arm; nothing if it was not measured."""
    facts = results.get("steps", {}).get(rate, {})
    found: Timed = facts.get("arms", {})
    return found | {name: found[arm.like] for name, arm in VARIANTS.items() if arm.like in found}


def step_s(timed: Timed, arm: str) -> float | None:
    return median(timed[arm]["samples_s"]) if arm in timed else None


def scaled(curve: Curve, factor: float) -> Curve:
    """The curve by seconds, by bytes or by samples."""
    return [(step * factor, loss) for step, loss in curve]


def loss_at(curve: Curve, x: float) -> float | None:
    """On straight lines between points; None before the first, and the last one after it.

    >>> loss_at([(50, 3.0), (100, 2.0)], 75), loss_at([(50, 3.0)], 20), loss_at([(50, 3.0)], 90)
    (2.5, None, 3.0)
    """
    before: tuple[float, float] | None = None
    for point in curve:
        if point[0] >= x:
            if point[0] == x:
                return point[1]
            return (
                None
                if before is None
                else before[1] + (point[1] - before[1]) * (x - before[0]) / (point[0] - before[0])
            )
        before = point
    return None if before is None else before[1]


def by_the_clock(runs: list[Run], timed: Timed, arm: str) -> Curve | None:
    """Mean loss over seconds; None if its steps were not timed."""
    seconds = step_s(timed, arm)
    return None if seconds is None else scaled(mean_curve(runs), seconds)


def peers_time(arms: dict[str, list[Run]], timed: Timed) -> float | None:
    """Seconds in which DDP takes all its steps."""
    curve = by_the_clock(arms[PEER], timed, PEER) if PEER in arms else None
    return curve[-1][0] if curve else None


def time_to(curve: Curve | None, target: float | None) -> float | None:
    return None if curve is None or target is None else reached_at(curve, target)
