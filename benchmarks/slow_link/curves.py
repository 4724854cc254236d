"""A picture of learning by the clock: loss on held-out text over (steps so far × step time at a rate), per arm."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

from gradsync import svg
from slow_link.arm_colors import line, page
from slow_link.arms import ARMS
from slow_link.store import Results
from slow_link.target import Curve, clock, is_timed, mean_curve, runs_by_task, title_of

# All in px.
_LEFT, _PANEL, _GAP, _TOP, _HEIGHT, _FOOT, _KEY = 56, 380, 52, 66, 340, 44, 240
_ROW = _HEIGHT + _FOOT + 34
_LINE = 18  # of the key
_TICKS_S = {1: "1 s", 10: "10 s", 30: "30 s", 60: "1 min", 300: "5 min", 1800: "30 min", 7200: "2 h", 36000: "10 h"}


def picture(results: Results) -> str:
    """The whole SVG: a row per task whose steps were timed, a panel per rate."""
    steps = results.get("steps", {})
    tasks = {task: arms for task, arms in runs_by_task(results.get("loss", {})).items() if is_timed(task)}
    learned = [{arm: mean_curve(runs) for arm, runs in arms.items()} for arms in tasks.values()]
    width = _LEFT + len(steps) * (_PANEL + _GAP) + _KEY
    parts: list[str] = []
    for (row, task), (column, (rate, facts)) in product(enumerate(tasks), enumerate(steps.items())):
        parts += _panel(row, column, f"{title_of(task)}, at {rate}", facts["arms"], learned[row])
    drawn = [name for name in ARMS if any(name in curves for curves in learned) and _drawn(name, steps)]
    height = _TOP + len(tasks) * _ROW
    title = "loss on held-out text by the clock, mean over seeds"
    return page(width, height, title, [*parts, *_key(drawn, width - _KEY)])


def _drawn(arm: str, steps: dict[str, Any]) -> bool:
    return any(clock(arm, facts["arms"]) for facts in steps.values())


def _panel(row: int, column: int, title: str, timed: dict[str, Any], learned: dict[str, Curve]) -> Iterator[str]:
    curves = {
        arm: [(seconds_of(step), loss) for step, loss in curve]
        for arm, curve in learned.items()
        if (seconds_of := clock(arm, timed)) is not None
    }
    left, top = _LEFT + column * (_PANEL + _GAP), _TOP + row * _ROW
    yield svg.text("", left, top - 12, title)
    if not curves:
        return
    axes = _Axes(left, top, [point for curve in curves.values() for point in curve])
    yield from axes.grid()
    for arm, curve in curves.items():
        yield svg.path(line(arm), axes.at(curve), says=arm)


class _Axes:
    """From seconds (logarithmic) and loss to px."""

    def __init__(self, left: float, top: float, points: Curve) -> None:
        times, losses = [time for time, _ in points], [loss for _, loss in points]
        self._plot = svg.Plot(left, top, _PANEL, _HEIGHT, min(times), max(times))
        # A tenth of a nat is a line of the grid.
        self._low, self._high = math.floor(10 * min(losses)), math.ceil(10 * max(losses))

    def at(self, curve: Curve) -> list[tuple[float, float]]:
        return [(self._plot.x(seconds), self._y(loss)) for seconds, loss in curve]

    def grid(self) -> Iterator[str]:
        every = max(1, (self._high - self._low) // 8)
        rows = [(self._y(tenth / 10), f"{tenth / 10:.1f}") for tenth in range(self._low, self._high + 1, every)]
        low, high = self._plot.low, self._plot.high
        return self._plot.grid(
            rows, [(seconds, label) for seconds, label in _TICKS_S.items() if low <= seconds <= high]
        )

    def _y(self, loss: float) -> float:
        return self._plot.top + _HEIGHT * (self._high - 10 * loss) / ((self._high - self._low) or 1)


def _key(arms: list[str], x: float) -> Iterator[str]:
    for i, arm in enumerate(arms):
        y = _TOP + 6 + i * _LINE
        yield svg.path(line(arm), [(x, y), (x + 28, y)])
        yield svg.text("", x + 36, y + 4, arm)
