"""A picture of learning by the clock: loss on held-out text over (steps so far × step time at a rate), per arm."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

from slow_link.arms import ARMS
from slow_link.store import Results
from slow_link.svg import line, page
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
    return page(width, height, title, 16, [*parts, *_key(drawn, width - _KEY)])


def _drawn(arm: str, steps: dict[str, Any]) -> bool:
    return any(clock(arm, facts["arms"]) for facts in steps.values())


def _panel(row: int, column: int, title: str, timed: dict[str, Any], learned: dict[str, Curve]) -> Iterator[str]:
    curves = {
        arm: [(seconds_of(step), loss) for step, loss in curve]
        for arm, curve in learned.items()
        if (seconds_of := clock(arm, timed)) is not None
    }
    left, top = _LEFT + column * (_PANEL + _GAP), _TOP + row * _ROW
    yield f'<text x="{left}" y="{top - 12}">{title}</text>'
    if not curves:
        return
    axes = _Axes(left, top, [point for curve in curves.values() for point in curve])
    yield from axes.grid()
    for arm, curve in curves.items():
        yield f'<path class="{line(arm)}" d="{axes.path(curve)}"><title>{arm}</title></path>'


class _Axes:
    """From seconds (logarithmic) and loss to px."""

    def __init__(self, left: float, top: float, points: Curve) -> None:
        times, losses = [time for time, _ in points], [loss for _, loss in points]
        self._left, self._top = left, top
        self._begin, self._end = math.log(min(times)), math.log(max(times))
        # A tenth of a nat is a line of the grid.
        self._low, self._high = math.floor(10 * min(losses)), math.ceil(10 * max(losses))

    def x(self, seconds: float) -> float:
        return self._left + _PANEL * (math.log(seconds) - self._begin) / ((self._end - self._begin) or 1)

    def y(self, loss: float) -> float:
        return self._top + _HEIGHT * (self._high - 10 * loss) / ((self._high - self._low) or 1)

    def path(self, curve: Curve) -> str:
        return "M" + "L".join(f"{self.x(seconds):.1f} {self.y(loss):.1f}" for seconds, loss in curve)

    def grid(self) -> Iterator[str]:
        right, foot = self._left + _PANEL, self._top + _HEIGHT
        every = max(1, (self._high - self._low) // 8)
        for tenth in range(self._low, self._high + 1, every):
            y = self.y(tenth / 10)
            yield f'<line class="grid" x1="{self._left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
            yield f'<text class="y" x="{self._left - 8}" y="{y + 4:.1f}">{tenth / 10:.1f}</text>'
        for seconds, label in _TICKS_S.items():
            if self._begin <= math.log(seconds) <= self._end:
                x = self.x(seconds)
                yield f'<line class="grid" x1="{x:.1f}" y1="{self._top}" x2="{x:.1f}" y2="{foot}"/>'
                yield f'<text class="x" x="{x:.1f}" y="{foot + 18}">{label}</text>'


def _key(arms: list[str], x: float) -> Iterator[str]:
    for i, arm in enumerate(arms):
        y = _TOP + 6 + i * _LINE
        yield f'<path class="{line(arm)}" d="M{x} {y}h28"/><text x="{x + 36}" y="{y + 4}">{arm}</text>'
