"""Overhead against something that grows by factors, as a picture: one line for each kind of plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from gradsync import svg
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
    plot = svg.Plot(_LEFT, _TOP, _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM, min(ends), max(ends))
    shares = [(_y(plot, percent / 100), f"{percent} %") for percent in (0, 25, 50, 75, 100)]
    parts = [*plot.grid(shares, [(value, escape(label)) for value, label in labels])]
    if mark is not None and plot.low <= mark.at <= plot.high:
        x = plot.x(mark.at)
        parts += [svg.line("mark", x, _TOP, x, plot.foot), svg.text("x", x, _TOP - 2, escape(mark.name))]
    for number, line in enumerate(lines):
        parts += _line(plot, number, line)
        y = _HEIGHT + _KEY * number
        parts.append(svg.path(f"series s{number}", [(_LEFT, y), (_LEFT + 28, y)]))
        parts.append(svg.text("", _LEFT + 36, y + 4, escape(line.name)))
    return svg.figure("chart", _WIDTH, _HEIGHT + _KEY * len(lines), "overhead by size", parts)


def _y(plot: svg.Plot, share: float) -> float:
    return plot.top + plot.height * (1 - min(1.0, max(0.0, share)))


def _line(plot: svg.Plot, number: int, line: Line) -> Iterator[str]:
    points = [(plot.x(x), _y(plot, share)) for x, share in line.points]
    yield svg.path(f"series s{number}", points)
    for (x, y), (_, share) in zip(points, line.points, strict=True):
        yield svg.circle(f"f{number}", x, y, 3, escape(f"{line.name}: {show_share(share)}"))
