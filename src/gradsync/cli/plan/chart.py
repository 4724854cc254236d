"""Overhead against something that grows by factors, as a picture: one line for each kind of plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from gradsync.cli.plan.figures import show_share

# All in px.
_WIDTH, _HEIGHT = 860, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 24, 14, 44
_KEY = 20  # a line of the key


@dataclass(frozen=True)
class Line:
    """A name and (x, overhead) by rising x."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class ChartMark:
    """A place on the axis that is worth a name: today's network."""

    at: float
    name: str


def draw_chart(lines: Sequence[Line], labels: Sequence[tuple[float, str]], mark: ChartMark | None = None) -> str:
    """An SVG: x logarithmic with these labels, y from 0 to 100 % of the step."""
    ends = [x for line in lines for x, _ in line.points]
    scale = _Scale(min(ends), max(ends))
    height = _HEIGHT + _KEY * len(lines)
    parts = [f'<svg class="chart" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="overhead by size">']
    parts += _grid(scale, labels)
    if mark is not None and scale.low <= mark.at <= scale.high:
        x = scale.x(mark.at)
        parts.append(f'<line class="mark" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_HEIGHT - _BOTTOM}"/>')
        parts.append(f'<text class="x" x="{x:.1f}" y="{_TOP - 2}">{escape(mark.name)}</text>')
    for number, line in enumerate(lines):
        parts += _line(scale, number, line)
        y = _HEIGHT + _KEY * number
        parts.append(f'<path class="series s{number}" d="M{_LEFT} {y}h28"/>')
        parts.append(f'<text x="{_LEFT + 36}" y="{y + 4}">{escape(line.name)}</text>')
    return "\n".join([*parts, "</svg>"])


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float

    def x(self, value: float) -> float:
        width = _WIDTH - _LEFT - _RIGHT
        if self.low == self.high:
            return _LEFT + width / 2
        return _LEFT + width * math.log(value / self.low) / math.log(self.high / self.low)

    @staticmethod
    def y(share: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - min(1.0, max(0.0, share)))


def _grid(scale: _Scale, labels: Sequence[tuple[float, str]]) -> Iterator[str]:
    foot, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for percent in (0, 25, 50, 75, 100):
        y = scale.y(percent / 100)
        yield f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
        yield f'<text class="y" x="{_LEFT - 8}" y="{y + 4:.1f}">{percent} %</text>'
    free = -math.inf  # where the next label may begin
    for value, label in labels:
        x = scale.x(value)
        yield f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{foot}"/>'
        if x - 4 * len(label) > free:
            yield f'<text class="x" x="{x:.1f}" y="{foot + 18}">{escape(label)}</text>'
            free = x + 4 * len(label)


def _line(scale: _Scale, number: int, line: Line) -> Iterator[str]:
    path = "L".join(f"{scale.x(x):.1f} {scale.y(share):.1f}" for x, share in line.points)
    yield f'<path class="series s{number}" d="M{path}"/>'
    for x, share in line.points:
        says = f"{line.name}: {show_share(share)}"
        yield (
            f'<circle class="f{number}" cx="{scale.x(x):.1f}" cy="{scale.y(share):.1f}" r="3">'
            f"<title>{escape(says)}</title></circle>"
        )
