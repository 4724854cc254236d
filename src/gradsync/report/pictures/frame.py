"""The frame of every picture of a page, wide and narrow, with its key and its axis of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from gradsync import svg


class Frame(NamedTuple):
    """The room for a picture: all pictures of a page share their left and right edge. In px."""

    screen: str  # wide or narrow
    width: float
    left: float
    right: float
    ticks: int  # about, on an axis of time

    @property
    def plot(self) -> float:
        """The width between the edges."""
        return self.width - self.left - self.right

    @property
    def end(self) -> float:
        """The right edge of the drawing."""
        return self.width - self.right

    def x_at(self, share: float) -> float:
        """The x of a share from 0 (the left edge of the drawing) to 1 (its right edge)."""
        return self.left + self.plot * share

    def tip(self, says: str) -> str:
        """A tooltip, where there is a mouse."""
        return says if self.screen == "wide" else ""


WIDE = Frame("wide", 920, 96, 14, 8)
NARROW = Frame("narrow", 344, 62, 6, 4)  # a phone's: drawn apart, or its end, which is now, would be off the screen

Drawing = tuple[float, list[str]]  # its height, and what is in it


def picture(kind: str, label: str, draw: Callable[[Frame], Drawing]) -> str:
    """The picture for wide and for narrow screens; style.css shows one. `label` is for those who cannot see it."""
    return "".join(_framed(kind, label, frame, *draw(frame)) for frame in (WIDE, NARROW))


def _framed(kind: str, label: str, frame: Frame, height: float, parts: Sequence[str]) -> str:
    return f'<div class="drawn {frame.screen}">{svg.figure(kind, frame.width, height, label, parts)}</div>'


def key(*entries: tuple[str, str]) -> str:
    """Return a key of what the colours mean: (class, words) each."""
    told = (
        f"<span>{svg.symbol('swatch', 12, 12, svg.rect(kind, 0, 0, 12, 12))}{says}</span>" for kind, says in entries
    )
    return f'<p class="key">{"".join(told)}</p>'


def step_axis(frame: Frame, firsts: Sequence[int], last: int, y: float) -> Iterator[str]:
    """Numbers below columns: the step with which the first and the middle one begin, and the last step of all."""
    yield svg.text("pale", frame.left, y, f"step {firsts[0]}")
    if len(firsts) > 2:
        yield svg.text("x pale", frame.x_at((len(firsts) // 2) / len(firsts)), y, str(firsts[len(firsts) // 2]))
    if len(firsts) > 1:
        yield svg.text("y pale", frame.end, y, str(last))
