"""One picture: loss on held-out text against samples, against the clock and against bytes; a line per arm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pace import clock
from pace.arms import ARMS, LINK
from slow_link.store import Results
from slow_link.svg import page
from slow_link.target import Curve, Run, mean_curve

# All in px.
_LEFT, _PANEL, _GAP, _TOP, _HEIGHT, _FOOT, _KEY = 56, 330, 52, 66, 360, 50, 230
_LINE = 19  # of the key
_DASHES = {"longer": "2 3", "often": "7 4", "else": ""}
_RARE = 50  # steps in a window

Label = Callable[[float], str]


def picture(results: Results) -> str:
    """The whole SVG: the task of most steps."""
    task, arms = next(reversed(clock.tasks_of(results).items()), ("nothing learned yet", {}))
    timed = clock.timed_of(results)
    by_arm = _low({arm: mean_curve(runs) for arm, runs in arms.items() if arm in ARMS})
    panels = [
        ("sequences read, by both ranks", dict.fromkeys(by_arm, float(clock.SAMPLES_PER_STEP)), _count),
        (f"time at {LINK}", {arm: clock.step_s(timed, arm) or 0.0 for arm in by_arm}, _time),
        ("bytes sent by a rank", {arm: float(timed.get(arm, {}).get("sent_nbytes", 0)) for arm in by_arm}, _bytes),
    ]
    width = _LEFT + len(panels) * (_PANEL + _GAP) + _KEY
    drawn = (part for i, panel in enumerate(panels) for part in _panel(i, *panel, by_arm))
    key = _key([name for name in ARMS if name in by_arm], width - _KEY)
    title = f"loss on held-out text: {task}, mean of {_num_seeds(arms)} seeds"
    height = _TOP + max(_HEIGHT, _LINE * len(by_arm)) + _FOOT
    return page(width, height, title, 16, [*drawn, *key])


def _low(by_arm: dict[str, Curve]) -> dict[str, Curve]:
    """Without the first fall, which is alike for all and would press the rest together: below the worst halfway."""
    most = max((curve[len(curve) // 2][1] for curve in by_arm.values()), default=0.0)
    return {arm: [point for point in curve if point[1] <= most] for arm, curve in by_arm.items()}


def _num_seeds(arms: dict[str, list[Run]]) -> str:
    counts = sorted({len(runs) for runs in arms.values()})
    return " to ".join(str(count) for count in sorted({counts[0], counts[-1]})) if counts else "no"


def _panel(column: int, title: str, factors: dict[str, float], label: Label, by_arm: dict[str, Curve]) -> Iterator[str]:
    left = _LEFT + column * (_PANEL + _GAP)
    yield f'<text x="{left}" y="{_TOP - 12}">{title}</text>'
    curves = {arm: clock.scaled(curve, factors[arm]) for arm, curve in by_arm.items() if factors[arm] > 0}
    if not curves:
        return
    losses = [loss for curve in by_arm.values() for _, loss in curve]
    xs = [x for curve in curves.values() for x, _ in curve]
    axes = _Axes(left, min(xs), max(xs), math.floor(10 * min(losses)), math.ceil(10 * max(losses)))
    yield from axes.grid(label)
    for arm, curve in curves.items():
        yield f'<path {_look(arm)} d="{axes.path(curve)}"><title>{arm}</title></path>'


@dataclass(frozen=True)
class _Axes:
    """From something (logarithmic) and loss, in tenths of a nat, to px."""

    left: float
    begin: float
    end: float
    low: int
    high: int

    def x(self, value: float) -> float:
        span = math.log(self.end / self.begin) or 1
        return self.left + _PANEL * math.log(value / self.begin) / span

    def y(self, loss: float) -> float:
        return _TOP + _HEIGHT * (self.high - 10 * loss) / ((self.high - self.low) or 1)

    def path(self, curve: Curve) -> str:
        return "M" + "L".join(f"{self.x(value):.1f} {self.y(loss):.1f}" for value, loss in curve)

    def grid(self, label: Label) -> Iterator[str]:
        right, foot = self.left + _PANEL, _TOP + _HEIGHT
        for tenth in range(self.low, self.high + 1, max(1, (self.high - self.low) // 8)):
            y = self.y(tenth / 10)
            yield f'<line class="grid" x1="{self.left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
            yield f'<text class="y" x="{self.left - 8}" y="{y + 4:.1f}">{tenth / 10:.1f}</text>'
        for value in _ticks(self.begin, self.end):
            x = self.x(value)
            yield f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{foot}"/>'
            yield f'<text class="x" x="{x:.1f}" y="{foot + 18}">{label(value)}</text>'


def _ticks(begin: float, end: float) -> list[float]:
    """Round numbers in between; few, if there are many decades.

    >>> _ticks(0.9, 12), _ticks(9, 20000)
    ([1.0, 2.0, 5.0, 10.0], [10.0, 100.0, 1000.0, 10000.0])
    """
    digits = (1, 2, 5) if end / begin < 300 else (1,)
    decades = range(math.floor(math.log10(begin)), math.ceil(math.log10(end)) + 1)
    return [tick for ten in decades for digit in digits if begin <= (tick := digit * 10.0**ten) <= end]


def _look(arm: str) -> str:
    """An arm that takes more steps has the color of the one it is like; lines also tell apart without color."""
    like = ARMS[arm].like
    dash = _DASHES["longer" if like else "often" if 1 < ARMS[arm].window < _RARE else "else"]
    return f'class="series s{list(ARMS).index(like or arm)}"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _key(arms: list[str], x: float) -> Iterator[str]:
    for i, arm in enumerate(arms):
        y = _TOP + 6 + i * _LINE
        yield f'<path {_look(arm)} d="M{x} {y}h30"/><text x="{x + 38}" y="{y + 4}">{arm}</text>'


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _time(seconds: float) -> str:
    return f"{seconds:g} s"


def _bytes(nbytes: float) -> str:
    """
    >>> _bytes(2e6), _bytes(1e9)
    ('2 MB', '1 GB')
    """
    return f"{nbytes / 1e9:g} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:g} MB"
