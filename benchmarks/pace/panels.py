"""One picture: loss on held-out text against samples, against the clock and against bytes; a line per arm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from gradsync import svg
from pace import clock
from pace.arms import ARMS, LINK
from slow_link.arm_colors import page
from slow_link.store import Results
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
    return page(width, height, title, [*drawn, *key])


def _low(by_arm: dict[str, Curve]) -> dict[str, Curve]:
    """Without the first fall, which is alike for all and would press the rest together: below the worst halfway."""
    most = max((curve[len(curve) // 2][1] for curve in by_arm.values()), default=0.0)
    return {arm: [point for point in curve if point[1] <= most] for arm, curve in by_arm.items()}


def _num_seeds(arms: dict[str, list[Run]]) -> str:
    counts = sorted({len(runs) for runs in arms.values()})
    return " to ".join(str(count) for count in sorted({counts[0], counts[-1]})) if counts else "no"


def _panel(column: int, title: str, factors: dict[str, float], label: Label, by_arm: dict[str, Curve]) -> Iterator[str]:
    left = _LEFT + column * (_PANEL + _GAP)
    yield svg.text("", left, _TOP - 12, title)
    curves = {arm: clock.scaled(curve, factors[arm]) for arm, curve in by_arm.items() if factors[arm] > 0}
    if not curves:
        return
    losses = [loss for curve in by_arm.values() for _, loss in curve]
    xs = [x for curve in curves.values() for x, _ in curve]
    plot = svg.Plot(left, _TOP, _PANEL, _HEIGHT, min(xs), max(xs))
    # A tenth of a nat is a line of the grid.
    low, high = math.floor(10 * min(losses)), math.ceil(10 * max(losses))

    def y(loss: float) -> float:
        return plot.top + plot.height * (high - 10 * loss) / ((high - low) or 1)

    tenths = range(low, high + 1, max(1, (high - low) // 8))
    rows = [(y(tenth / 10), f"{tenth / 10:.1f}") for tenth in tenths]
    yield from plot.grid(rows, [(value, label(value)) for value in _ticks(plot.low, plot.high)])
    for arm, curve in curves.items():
        kind, dashes = _look(arm)
        yield svg.path(kind, [(plot.x(value), y(loss)) for value, loss in curve], says=arm, dashes=dashes)


def _ticks(begin: float, end: float) -> list[float]:
    """Round numbers in between; few, if there are many decades.

    >>> _ticks(0.9, 12), _ticks(9, 20000)
    ([1.0, 2.0, 5.0, 10.0], [10.0, 100.0, 1000.0, 10000.0])
    """
    digits = (1, 2, 5) if end / begin < 300 else (1,)
    decades = range(math.floor(math.log10(begin)), math.ceil(math.log10(end)) + 1)
    return [tick for ten in decades for digit in digits if begin <= (tick := digit * 10.0**ten) <= end]


def _look(arm: str) -> tuple[str, str]:
    """Class and dashes. An arm that takes more steps has the color of the one it is like; dashes tell apart, too."""
    like = ARMS[arm].like
    dashes = _DASHES["longer" if like else "often" if 1 < ARMS[arm].window < _RARE else "else"]
    return f"series s{list(ARMS).index(like or arm)}", dashes


def _key(arms: list[str], x: float) -> Iterator[str]:
    for i, arm in enumerate(arms):
        y = _TOP + 6 + i * _LINE
        kind, dashes = _look(arm)
        yield svg.path(kind, [(x, y), (x + 30, y)], dashes=dashes)
        yield svg.text("", x + 38, y + 4, arm)


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
