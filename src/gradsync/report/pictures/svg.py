"""The few shapes all pictures are made of. Texts must come escaped (words.py); colours are classes (style.css)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple


class Frame(NamedTuple):
    """The room for a picture: all pictures of a page share their left and right edge. In px."""

    screen: str  # wide or narrow
    width: float
    left: float
    right: float
    ticks: int  # about, on an axis of time

    @property
    def plot(self) -> float:
        """What is between the edges."""
        return self.width - self.left - self.right

    @property
    def end(self) -> float:
        """The right edge of the drawing."""
        return self.width - self.right

    def x_at(self, share: float) -> float:
        """From 0 (the left edge of the drawing) to 1 (its right edge)."""
        return self.left + self.plot * share

    def tip(self, says: str) -> str:
        """A tooltip, where there is a mouse."""
        return says if self.screen == "wide" else ""


WIDE = Frame("wide", 920, 96, 14, 8)
NARROW = Frame("narrow", 344, 62, 6, 4)  # a phone's: drawn apart, or its end, which is now, would be off the screen

Drawing = tuple[float, list[str]]  # its height, and what is in it


def picture(kind: str, label: str, draw: Callable[[Frame], Drawing]) -> str:
    """The picture for wide and for narrow screens; style.css shows one. `label` is for those who cannot see it."""
    return "".join(_figure(kind, label, frame, *draw(frame)) for frame in (WIDE, NARROW))


def _figure(kind: str, label: str, frame: Frame, height: float, parts: Sequence[str]) -> str:
    opening = f'<svg class="{kind}" viewBox="0 0 {frame.width:g} {height:g}" role="img" aria-label="{label}">'
    return "\n".join([f'<div class="drawn {frame.screen}">{opening}', *parts, "</svg></div>"])


def rect(kind: str, x: float, y: float, width: float, height: float, says: str = "") -> str:
    """A bar; `says` is its tooltip.

    >>> rect("wire", 1, 2, 3.04, 4, "hello")
    '<rect class="wire" x="1" y="2" width="3" height="4"><title>hello</title></rect>'
    """
    shape = f'<rect class="{kind}" x="{_px(x)}" y="{_px(y)}" width="{_px(max(width, 0.5))}" height="{_px(height)}"'
    return f"{shape}><title>{says}</title></rect>" if says else f"{shape}/>"


def text(kind: str, x: float, y: float, content: str) -> str:
    """
    >>> text("x", 1, 2, "a")
    '<text class="x" x="1" y="2">a</text>'
    """
    return f'<text class="{kind}" x="{_px(x)}" y="{_px(y)}">{content}</text>'


def line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{_px(x1)}" y1="{_px(y1)}" x2="{_px(x2)}" y2="{_px(y2)}"/>'


def path(kind: str, points: Iterable[tuple[float, float]], closed: bool = False) -> str:
    """A line through points, or the area inside them.

    >>> path("area", [(0, 0), (1.25, 2)], closed=True)
    '<path class="area" d="M0 0L1.2 2z"/>'
    """
    way = "L".join(f"{_px(x)} {_px(y)}" for x, y in points)
    return f'<path class="{kind}" d="M{way}{"z" if closed else ""}"/>'


def key(*entries: tuple[str, str]) -> str:
    """What the colours mean: (class, words) each."""
    told = ""
    for kind, words in entries:
        box = f'<rect class="{kind}" width="12" height="12"/>'
        told += f'<span><svg class="swatch" viewBox="0 0 12 12" aria-hidden="true">{box}</svg>{words}</span>'
    return f'<p class="key">{told}</p>'


def step_axis(frame: Frame, firsts: Sequence[int], last: int, y: float) -> Iterator[str]:
    """Numbers below columns: the step with which the first and the middle one begin, and the last step of all."""
    yield text("pale", frame.left, y, f"step {firsts[0]}")
    if len(firsts) > 2:
        yield text("x pale", frame.x_at((len(firsts) // 2) / len(firsts)), y, str(firsts[len(firsts) // 2]))
    if len(firsts) > 1:
        yield text("y pale", frame.end, y, str(last))


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
