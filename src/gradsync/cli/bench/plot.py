"""The result as a picture: time by size, both logarithmic, in an SVG that needs nothing else.

Color tells the arm, dashes the setting. The memory bound is the straight dashed line; what lies below it
came from a cache.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from gradsync import svg
from gradsync.cli.bench.bench_config import Setting
from gradsync.cli.bench.bench_result import BenchResult, Cell
from gradsync.cli.bench.memory_bandwidth import bound_s
from gradsync.cli.bench.sizes import show_size
from gradsync.cli.bench.text import show_seconds

# All in px.
_WIDTH, _HEIGHT = 860, 520
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 218, 52, 48
_LINE = 18  # of the key

# On a light and on a dark page.
_COLORS = (
    *(("#1565c0", "#64b5f6"), ("#c75b00", "#ffb74d"), ("#2e7d32", "#81c784"), ("#8e24aa", "#ce93d8")),
    *(("#c62828", "#ef9a9a"), ("#00838f", "#4dd0e1"), ("#6d4c41", "#bcaaa4"), ("#ad1457", "#f48fb1")),
    *(("#827717", "#dce775"), ("#3949ab", "#9fa8da")),
)
_DASHES = {
    Setting("warm", False): "none",
    Setting("cold", False): "7 3",
    Setting("warm", True): "2 3",
    Setting("cold", True): "7 3 2 3",
}

_STYLE = ".bound { stroke: #777; stroke-width: 1.5; stroke-dasharray: 9 5; fill: none }"
_DARK_STYLE = ".bound { stroke: #aaa }"

Point = tuple[float, float]  # nbytes, seconds
Series = dict[tuple[str, Setting], list[Cell]]


def plot(result: BenchResult) -> str:
    """The whole SVG."""
    series: Series = defaultdict(list)
    for cell in result.cells:
        series[cell.arm, cell.setting].append(cell)
    arms = list(dict.fromkeys(cell.arm for cell in result.cells))
    bound = _bound(result)
    axes = _Axes([(cell.nbytes, cell.time_s) for cell in result.cells] + bound)
    parts = [svg.text("title", _LEFT, 28, _title(result)), *axes.grid()]
    if bound:
        parts.append(svg.path("bound", axes.at(bound)))
    for (arm, setting), cells in series.items():
        parts += _series(axes, arms.index(arm), setting, cells)
    parts += _key(series, arms, bool(bound))
    return svg.chart(_WIDTH, _HEIGHT, parts, _COLORS[: len(arms)], _STYLE, _DARK_STYLE)


class _Axes:
    """The map from bytes and seconds to px: whole decades of time, the sizes that there are."""

    def __init__(self, points: Sequence[Point]) -> None:
        times = [seconds for _, seconds in points]
        self._sizes = sorted({int(nbytes) for nbytes, _ in points})
        self._low, self._high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
        self._high = max(self._high, self._low + 1)
        width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        self._plot = svg.Plot(_LEFT, _TOP, width, height, self._sizes[0], self._sizes[-1])

    def at(self, points: Sequence[Point]) -> list[tuple[float, float]]:
        return [(self._plot.x(nbytes), self._y(seconds)) for nbytes, seconds in points]

    def grid(self) -> Iterator[str]:
        decades = [(self._y(10.0**exponent), _decade(exponent)) for exponent in range(self._low, self._high + 1)]
        yield from self._plot.grid(decades, [(nbytes, show_size(nbytes)) for nbytes in self._sizes])
        yield svg.text("x", (self._plot.left + self._plot.right) / 2, self._plot.foot + 38, "bytes on each rank")

    def _y(self, seconds: float) -> float:
        return _TOP + self._plot.height * (self._high - math.log10(seconds)) / (self._high - self._low)


def _bound(result: BenchResult) -> list[Point]:
    if result.memory_bandwidth is None:
        return []
    sizes = sorted({cell.nbytes for cell in result.cells})
    return [(size, bound_s(size, result.ranks, result.memory_bandwidth)) for size in (sizes[0], sizes[-1])]


def _series(axes: _Axes, color: int, setting: Setting, cells: list[Cell]) -> Iterator[str]:
    points = axes.at([(cell.nbytes, cell.time_s) for cell in cells])
    yield svg.path(f"series s{color}", points, dashes=_DASHES[setting])
    for cell, (x, y) in zip(cells, points, strict=True):
        says = f"{_label(cell.arm, setting)}, {show_size(cell.nbytes)}: {show_seconds(cell.time_s)}"
        yield svg.circle(f"f{color}", x, y, says)


def _key(series: Series, arms: list[str], bound: bool) -> Iterator[str]:
    """The key on the right, slowest first: in the order in which the lines end."""
    x, y = _WIDTH - _RIGHT + 16, _TOP + 6
    for arm, setting in sorted(series, key=lambda line: -series[line][-1].time_s):
        yield svg.path(f"series s{arms.index(arm)}", [(x, y), (x + 28, y)], dashes=_DASHES[setting])
        yield svg.text("", x + 36, y + 4, _label(arm, setting))
        y += _LINE
    if bound:
        yield svg.path("bound", [(x, y), (x + 28, y)])
        yield svg.text("", x + 36, y + 4, "bound by memory")


def _decade(exponent: int) -> str:
    """
    >>> _decade(-5), _decade(-2), _decade(0)
    ('10 µs', '10 ms', '1 s')
    """
    shift, unit = next((s, u) for s, u in ((9, "ns"), (6, "µs"), (3, "ms"), (0, "s")) if exponent < 3 - s or s == 0)
    return f"{10 ** (exponent + shift)} {unit}"


def _title(result: BenchResult) -> str:
    return f"all-reduce of {result.dtype} on {result.ranks} ranks: time by size"


def _label(arm: str, setting: Setting) -> str:
    return f"{arm}, {setting.cache}{', busy' if setting.busy else ''}"
