"""The cost of synchronization, step after step: the share of the step in which ranks had nothing to compute.

Two areas on top of each other (waiting for a late rank, then for the exchange itself), and the step time below them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gradsync import svg
from gradsync.report.lateness import own_s
from gradsync.report.overhead import exposed
from gradsync.report.pictures.binning import bins, mean, quantile, round_up
from gradsync.report.pictures.escape import steps
from gradsync.report.pictures.frame import NARROW, Drawing, Frame, key, picture, step_axis
from gradsync.report.table import Table
from gradsync.report.wording import show_share
from gradsync.units import show_seconds

# All in px.
_TOP, _HIGH, _BETWEEN, _LOW = 12, 170, 34, 70

_MOST_POINTS = 160


class OverheadPoint(NamedTuple):
    """Some steps together, averaged over their ranks."""

    first: int
    last: int
    late: float  # share of the step spent waiting until the last rank was there
    network: float  # and after that
    step_s: float

    @property
    def both(self) -> float:
        return self.late + self.network


def costs(table: Table) -> list[OverheadPoint]:
    """The overhead of steps that count, in at most 160 groups."""
    found = [cost for step in table.judged() if (cost := _cost(table, step)) is not None]
    return [_together(group) for group in bins(found, _MOST_POINTS)]


def draw_overhead(table: Table) -> str:
    """The figure with its key and caption; empty for a run with fewer than two steps that count."""
    points = costs(table)
    if len(points) < 2:
        return ""
    top = min(1.0, round_up(1.1 * max(max(point.both for point in points), 0.02)))
    slowest = round_up(1.15 * quantile([point.step_s for point in points], 0.97))
    foot = _TOP + _HIGH + _BETWEEN + _LOW

    def draw(frame: Frame) -> Drawing:
        parts = [*_shares(frame, points, top), *_times(frame, points, slowest), *_tips(frame, points, foot)]
        parts += step_axis(frame, [point.first for point in points], points[-1].last, foot + 18)
        return foot + 24, parts

    usual = show_share(mean(point.both for point in points))
    drawing = picture("overhead", f"Overhead over time: {usual} of the step on average", draw)
    colours = key(
        ("network", "waits for the exchange itself"), ("late", "waits for a late rank"), ("pace", "step time")
    )
    return f"{drawing}{colours}<p>{_caption(points)}</p>"


def _cost(table: Table, step: int) -> OverheadPoint | None:
    cells = [cell for rank in table.ranks if (cell := table.cell(step, rank)) is not None and cell.step_s > 0]
    if not cells:
        return None
    last_own = max(own_s(cell) for cell in cells)
    late = mean(min(last_own - own_s(cell), exposed(cell)) / cell.step_s for cell in cells)
    both = mean(exposed(cell) / cell.step_s for cell in cells)
    return OverheadPoint(step, step, late, max(0.0, both - late), quantile([cell.step_s for cell in cells], 0.5))


def _together(group: Sequence[OverheadPoint]) -> OverheadPoint:
    late, network = mean(cost.late for cost in group), mean(cost.network for cost in group)
    return OverheadPoint(group[0].first, group[-1].last, late, network, quantile([cost.step_s for cost in group], 0.5))


def _shares(frame: Frame, points: Sequence[OverheadPoint], top: float) -> Iterator[str]:
    def y(share: float) -> float:
        return _TOP + _HIGH * (1 - min(1.0, share / top))

    for part in range(5):
        height = y(top * part / 4)
        yield svg.line("grid", frame.left, height, frame.end, height)
        yield svg.text("y pale", frame.left - 10, height + 4, show_share(top * part / 4))
    network = [(_x(frame, index, points), y(point.network)) for index, point in enumerate(points)]
    both = [(_x(frame, index, points), y(point.both)) for index, point in enumerate(points)]
    floor = [(network[-1][0], y(0)), (network[0][0], y(0))]
    yield svg.path("area network", [*network, *floor], closed=True)
    yield svg.path("area late", [*both, *reversed(network)], closed=True)
    yield svg.path("edge", both)


def _times(frame: Frame, points: Sequence[OverheadPoint], slowest: float) -> Iterator[str]:
    top = _TOP + _HIGH + _BETWEEN

    def y(step_s: float) -> float:
        return top + _LOW * (1 - min(1.0, step_s / slowest))

    for part in (0, 1):
        yield svg.line("grid", frame.left, y(slowest * part), frame.end, y(slowest * part))
        label = show_seconds(slowest) if part else "0"
        yield svg.text("y pale", frame.left - 10, y(slowest * part) + 4, label)
    yield svg.path("pace", [(_x(frame, index, points), y(point.step_s)) for index, point in enumerate(points)])


def _tips(frame: Frame, points: Sequence[OverheadPoint], foot: float) -> Iterator[str]:
    """Invisible columns that carry the numbers, where there is a mouse."""
    if frame is NARROW:
        return
    width = frame.plot / len(points)
    for index, point in enumerate(points):
        says = (
            f"{steps(point.first, point.last)}: {show_share(point.both)} exposed, {show_share(point.late)} of the step "
            f"for a late rank; step time {show_seconds(point.step_s)}"
        )
        yield svg.rect("tip", frame.left + width * index, _TOP, width, foot - _TOP, says)


def _caption(points: Sequence[OverheadPoint]) -> str:
    said = "Mean over the ranks: the share of each step in which a rank had nothing left to compute."
    most = max(point.last - point.first + 1 for point in points)
    return said + (f" Each point stands for up to {most} steps." if most > 1 else "")


def _x(frame: Frame, index: int, points: Sequence[OverheadPoint]) -> float:
    """The x of a point: the middle of its column, but the first and the last reach the edges."""
    return frame.x_at(index / (len(points) - 1))
