"""The result as a picture: time by size, both logarithmic, in an SVG that needs nothing else.

Color tells the arm, dashes the setting. The memory bound is the straight dashed line; what lies below it
came from a cache.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from gradsync.cli.bench.memory_bandwidth import bound_s
from gradsync.cli.bench.question import Setting
from gradsync.cli.bench.result import BenchResult, Cell
from gradsync.cli.bench.sizes import show_size
from gradsync.cli.bench.text import show_seconds

# All in px.
_WIDTH, _HEIGHT = 860, 520
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 218, 52, 48
_LINE = 18  # of the key

_COLORS = ("#1565c0", "#c75b00", "#2e7d32", "#8e24aa", "#c62828", "#00838f", "#6d4c41", "#ad1457", "#827717", "#3949ab")
_DARK = ("#64b5f6", "#ffb74d", "#81c784", "#ce93d8", "#ef9a9a", "#4dd0e1", "#bcaaa4", "#f48fb1", "#dce775", "#9fa8da")
_DASHES = {
    Setting("warm", False): "none",
    Setting("cold", False): "7 3",
    Setting("warm", True): "2 3",
    Setting("cold", True): "7 3 2 3",
}

_STYLE = """
.page { fill: #fff } text { font: 12px sans-serif; fill: #333 } .title { font-size: 14px; font-weight: bold }
.grid { stroke: #e0e4ea } .bound { stroke: #777; stroke-width: 1.5; stroke-dasharray: 9 5; fill: none }
.series { fill: none; stroke-width: 2 } .x { text-anchor: middle } .y { text-anchor: end }
"""
_DARK_STYLE = ".page { fill: #14171c } text { fill: #d5dae2 } .grid { stroke: #2c323b } .bound { stroke: #aaa }"

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
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}">',
        f"<style>{_style(len(arms))}</style>",
        '<rect class="page" width="100%" height="100%"/>',
        f'<text class="title" x="{_LEFT}" y="28">{_title(result)}</text>',
        *axes.grid(),
    ]
    if bound:
        parts.append(f'<path class="bound" d="{axes.path(bound)}"/>')
    for (arm, setting), cells in series.items():
        parts += _series(axes, arms.index(arm), setting, cells)
    return "\n".join([*parts, *_key(series, arms, bool(bound)), "</svg>"]) + "\n"


class _Axes:
    """From bytes and seconds to px: whole decades of time, the sizes that there are."""

    def __init__(self, points: list[Point]) -> None:
        sizes = [nbytes for nbytes, _ in points]
        times = [seconds for _, seconds in points]
        self._sizes = sorted({int(size) for size in sizes})
        self._left, self._right = math.log(min(sizes)), math.log(max(sizes))
        self._low, self._high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
        self._high = max(self._high, self._low + 1)

    def x(self, nbytes: float) -> float:
        width = _WIDTH - _LEFT - _RIGHT
        if self._left == self._right:
            return _LEFT + width / 2
        return _LEFT + width * (math.log(nbytes) - self._left) / (self._right - self._left)

    def y(self, seconds: float) -> float:
        height = _HEIGHT - _TOP - _BOTTOM
        return _TOP + height * (self._high - math.log10(seconds)) / (self._high - self._low)

    def path(self, points: list[Point]) -> str:
        return "M" + "L".join(f"{self.x(nbytes):.1f} {self.y(seconds):.1f}" for nbytes, seconds in points)

    def grid(self) -> Iterator[str]:
        left, right, foot = _LEFT, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        for exponent in range(self._low, self._high + 1):
            y = self.y(10.0**exponent)
            yield f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
            yield f'<text class="y" x="{left - 8}" y="{y + 4:.1f}">{_decade(exponent)}</text>'
        free = -math.inf  # where the next label may begin
        for nbytes in self._sizes:
            x, label = self.x(nbytes), show_size(nbytes)
            yield f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{foot}"/>'
            if x - 4 * len(label) > free:
                yield f'<text class="x" x="{x:.1f}" y="{foot + 18}">{label}</text>'
                free = x + 4 * len(label) + 4
        yield f'<text class="x" x="{(left + right) / 2:g}" y="{foot + 38}">bytes on each rank</text>'


def _bound(result: BenchResult) -> list[Point]:
    if result.memory_bandwidth is None:
        return []
    sizes = sorted({cell.nbytes for cell in result.cells})
    return [(size, bound_s(size, result.ranks, result.memory_bandwidth)) for size in (sizes[0], sizes[-1])]


def _series(axes: _Axes, color: int, setting: Setting, cells: list[Cell]) -> Iterator[str]:
    line = axes.path([(cell.nbytes, cell.time_s) for cell in cells])
    yield f'<path class="series s{color}" stroke-dasharray="{_DASHES[setting]}" d="{line}"/>'
    for cell in cells:
        says = f"{_label(cell.arm, setting)}, {show_size(cell.nbytes)}: {show_seconds(cell.time_s)}"
        yield (
            f'<circle class="f{color}" cx="{axes.x(cell.nbytes):.1f}" cy="{axes.y(cell.time_s):.1f}" r="3">'
            f"<title>{says}</title></circle>"
        )


def _key(series: Series, arms: list[str], bound: bool) -> Iterator[str]:
    """On the right, slowest first: in the order in which the lines end."""
    x, y = _WIDTH - _RIGHT + 16, _TOP + 6
    for arm, setting in sorted(series, key=lambda line: -series[line][-1].time_s):
        dashes = f'stroke-dasharray="{_DASHES[setting]}"'
        yield f'<path class="series s{arms.index(arm)}" {dashes} d="M{x} {y}h28"/>'
        yield f'<text x="{x + 36}" y="{y + 4}">{_label(arm, setting)}</text>'
        y += _LINE
    if bound:
        yield f'<path class="bound" d="M{x} {y}h28"/><text x="{x + 36}" y="{y + 4}">bound by memory</text>'


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


def _style(num_arms: int) -> str:
    def colors(palette: tuple[str, ...]) -> str:
        return "\n".join(f".s{i} {{ stroke: {c} }} .f{i} {{ fill: {c} }}" for i, c in enumerate(palette[:num_arms]))

    dark = f"@media (prefers-color-scheme: dark) {{ {_DARK_STYLE}\n{colors(_DARK)} }}"
    return f"{_STYLE}{colors(_COLORS)}\n{dark}"
