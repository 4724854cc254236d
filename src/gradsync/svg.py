"""Every picture is written here: the few shapes of SVG that all are made of, and what charts have in common.

Texts must come escaped, or be ours. A shape has classes; its colours are in the style sheet of the page or document.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

_CHART_STYLE = """
.page { fill: #fff } text { font: 12px sans-serif; fill: #333 } .title { font-size: 14px; font-weight: bold }
.grid { stroke: #e0e4ea } .series { fill: none; stroke-width: 2 } .x { text-anchor: middle } .y { text-anchor: end }
"""
_DARK_CHART_STYLE = ".page { fill: #14171c } text { fill: #d5dae2 } .grid { stroke: #2c323b }"
_LETTER = 8  # the width of one in a label, in px and generously


def document(width: float, height: float, style: str, parts: Iterable[str]) -> str:
    """A file of its own, that needs nothing else; the class of its background is `page`."""
    size = f'viewBox="0 0 {_px(width)} {_px(height)}" width="{_px(width)}" height="{_px(height)}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    page = '<rect class="page" width="100%" height="100%"/>'
    return "\n".join([opening, f"<style>{style}</style>", page, *parts, "</svg>\n"])


def chart(
    width: float,
    height: float,
    parts: Iterable[str],
    colors: Sequence[tuple[str, str]],
    style: str = "",
    dark_style: str = "",
) -> str:
    """A document that is light or dark as its reader is; series i has the class `s{i}` as a line, `f{i}` as an area."""
    light, dark = ("\n".join(_colors(side)) for side in zip(*colors, strict=True))
    sheet = f"{_CHART_STYLE}{style}\n{light}\n"
    sheet += f"@media (prefers-color-scheme: dark) {{ {_DARK_CHART_STYLE} {dark_style}\n{dark} }}"
    return document(width, height, sheet, parts)


def figure(kind: str, width: float, height: float, label: str, parts: Iterable[str]) -> str:
    """A picture in a page; `label` is for those who cannot see it."""
    opening = f'<svg class="{kind}" viewBox="0 0 {_px(width)} {_px(height)}" role="img" aria-label="{label}">'
    return "\n".join([opening, *parts, "</svg>"])


def symbol(kind: str, width: float, height: float, *parts: str) -> str:
    """A picture in a line of text or a cell, that says nothing by itself."""
    size = f'viewBox="0 0 {_px(width)} {_px(height)}"'
    return f'<svg class="{kind}" {size} aria-hidden="true">{"".join(parts)}</svg>'


def rect(kind: str, x: float, y: float, width: float, height: float, says: str = "") -> str:
    """A bar; `says` is its tooltip.

    >>> rect("wire", 1, 2, 3.04, 4, "hello")
    '<rect class="wire" x="1" y="2" width="3" height="4"><title>hello</title></rect>'
    """
    size = f'width="{_px(max(width, 0.5))}" height="{_px(height)}"'
    return _shape("rect", kind, f'x="{_px(x)}" y="{_px(y)}" {size}', says)


def circle(kind: str, x: float, y: float, says: str = "") -> str:
    return _shape("circle", kind, f'cx="{_px(x)}" cy="{_px(y)}" r="3"', says)


def line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return _shape("line", kind, f'x1="{_px(x1)}" y1="{_px(y1)}" x2="{_px(x2)}" y2="{_px(y2)}"')


def path(
    kind: str,
    points: Iterable[tuple[float, float]],
    closed: bool = False,
    says: str = "",
    dashes: str = "",
    data: Mapping[str, object] | None = None,
) -> str:
    """A line through points, or the area inside them; `data` is for whoever reads the file.

    >>> path("area", [(0, 0), (1.25, 2)], closed=True), path("edge", [(0, 0), (1, 2)], dashes="7 3", data={"rank": 1})
    ('<path class="area" d="M0 0L1.2 2z"/>', '<path class="edge" d="M0 0L1 2" stroke-dasharray="7 3" data-rank="1"/>')
    """
    way = "L".join(f"{_px(x)} {_px(y)}" for x, y in points)
    more = f' stroke-dasharray="{dashes}"' if dashes else ""
    more += "".join(f' data-{name}="{value}"' for name, value in (data or {}).items())
    return _shape("path", kind, f'd="M{way}{"z" if closed else ""}"{more}', says)


def text(kind: str, x: float, y: float, content: str) -> str:
    """
    >>> text("x", 1, 2, "a"), text("", 1, 2, "a")
    ('<text class="x" x="1" y="2">a</text>', '<text x="1" y="2">a</text>')
    """
    return f'<text {_class(kind)}x="{_px(x)}" y="{_px(y)}">{content}</text>'


def arrow_head(name: str) -> str:
    """The head that lines get whose style says `marker-end: url(#name)`; its own class is `name`, too."""
    box = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9" markerUnits="userSpaceOnUse"'
    head = path(name, [(0, 0), (8, 4), (0, 8)], closed=True)
    return f'<defs><marker id="{name}" {box} orient="auto">{head}</marker></defs>'


class Plot(NamedTuple):
    """The area of a chart in px, and the values at its left and right edge, between which x is logarithmic."""

    left: float
    top: float
    width: float
    height: float
    low: float
    high: float

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def foot(self) -> float:
        return self.top + self.height

    def x(self, value: float) -> float:
        """
        >>> plot = Plot(10, 0, 100, 50, low=1, high=100)
        >>> plot.x(1), plot.x(10), plot._replace(high=1).x(1)
        (10.0, 60.0, 60.0)
        """
        if self.low == self.high:
            return self.left + self.width / 2
        return self.left + self.width * math.log(value / self.low) / math.log(self.high / self.low)

    def grid(self, rows: Iterable[tuple[float, str]], columns: Iterable[tuple[float, str]]) -> Iterator[str]:
        """Lines with labels, at y in px and at values of x; a label that would cover the one before is left out."""
        for y, label in rows:
            yield line("grid", self.left, y, self.right, y)
            yield text("y", self.left - 8, y + 4, label)
        free = -math.inf  # where the next label may begin
        for value, label in columns:
            x, half = self.x(value), _LETTER * len(label) / 2
            yield line("grid", x, self.top, x, self.foot)
            if x - half > free:
                yield text("x", x, self.foot + 18, label)
                free = x + half


def _shape(tag: str, kind: str, where: str, says: str = "") -> str:
    shape = f"<{tag} {_class(kind)}{where}"
    return f"{shape}><title>{says}</title></{tag}>" if says else f"{shape}/>"


def _class(kind: str) -> str:
    return f'class="{kind}" ' if kind else ""


def _colors(palette: Iterable[str]) -> Iterator[str]:
    return (f".s{i} {{ stroke: {color} }} .f{i} {{ fill: {color} }}" for i, color in enumerate(palette))


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
