"""A picture of learning by the clock: loss on held-out text over (steps so far × step time at a rate), per arm."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median
from typing import Any

from slow_link.arms import ARMS
from slow_link.store import Results
from slow_link.svg import number, page
from slow_link.target import Curve, mean_curve, runs_by_task

# All in px.
_LEFT, _PANEL, _GAP, _TOP, _HEIGHT, _FOOT, _KEY = 56, 380, 52, 66, 340, 50, 200
_LINE = 18  # of the key
_TICKS_S = {1: "1 s", 10: "10 s", 30: "30 s", 60: "1 min", 300: "5 min", 1800: "30 min", 7200: "2 h", 36000: "10 h"}


def picture(results: Results) -> str:
    """The whole SVG: the first task of the file, a panel per rate."""
    steps = results.get("steps", {})
    tasks = runs_by_task(results.get("loss", {}))
    task = next(iter(tasks), "nothing measured yet")
    learned = {arm: mean_curve(runs) for arm, runs in tasks.get(task, {}).items()}
    width = _LEFT + len(steps) * (_PANEL + _GAP) + _KEY
    panels = (part for i, (rate, facts) in enumerate(steps.items()) for part in _panel(i, rate, facts["arms"], learned))
    key = _key([name for name in ARMS if name in learned], width - _KEY)
    title = f"loss on held-out text by the clock: {task}, mean over seeds"
    return page(width, _TOP + _HEIGHT + _FOOT, title, 16, [*panels, *key])


def _panel(column: int, rate: str, timed: dict[str, Any], learned: dict[str, Curve]) -> Iterator[str]:
    curves = {
        arm: [(step * median(timed[arm]["samples_s"]), loss) for step, loss in curve]
        for arm, curve in learned.items()
        if arm in timed
    }
    left = _LEFT + column * (_PANEL + _GAP)
    yield f'<text x="{left}" y="{_TOP - 12}">{rate}</text>'
    if not curves:
        return
    axes = _Axes(left, [point for curve in curves.values() for point in curve])
    yield from axes.grid()
    for arm, curve in curves.items():
        yield f'<path class="series s{number(arm)}" d="{axes.path(curve)}"><title>{arm}</title></path>'


class _Axes:
    """From seconds (logarithmic) and loss to px."""

    def __init__(self, left: float, points: Curve) -> None:
        times, losses = [time for time, _ in points], [loss for _, loss in points]
        self._left = left
        self._begin, self._end = math.log(min(times)), math.log(max(times))
        # A tenth of a nat is a line of the grid.
        self._low, self._high = math.floor(10 * min(losses)), math.ceil(10 * max(losses))

    def x(self, seconds: float) -> float:
        return self._left + _PANEL * (math.log(seconds) - self._begin) / ((self._end - self._begin) or 1)

    def y(self, loss: float) -> float:
        return _TOP + _HEIGHT * (self._high - 10 * loss) / ((self._high - self._low) or 1)

    def path(self, curve: Curve) -> str:
        return "M" + "L".join(f"{self.x(seconds):.1f} {self.y(loss):.1f}" for seconds, loss in curve)

    def grid(self) -> Iterator[str]:
        right, foot = self._left + _PANEL, _TOP + _HEIGHT
        every = max(1, (self._high - self._low) // 8)
        for tenth in range(self._low, self._high + 1, every):
            y = self.y(tenth / 10)
            yield f'<line class="grid" x1="{self._left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
            yield f'<text class="y" x="{self._left - 8}" y="{y + 4:.1f}">{tenth / 10:.1f}</text>'
        for seconds, label in _TICKS_S.items():
            if self._begin <= math.log(seconds) <= self._end:
                x = self.x(seconds)
                yield f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{foot}"/>'
                yield f'<text class="x" x="{x:.1f}" y="{foot + 18}">{label}</text>'


def _key(arms: list[str], x: float) -> Iterator[str]:
    for i, arm in enumerate(arms):
        y = _TOP + 6 + i * _LINE
        yield f'<path class="series s{number(arm)}" d="M{x} {y}h28"/><text x="{x + 36}" y="{y + 4}">{arm}</text>'
