"""Lateness of every rank in every step as a heat map: a straggler is a row, a bad moment a column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradsync import svg
from gradsync.report.lateness import LateRank
from gradsync.report.pictures.binning import bins, mean, quantile
from gradsync.report.pictures.escape import steps
from gradsync.report.pictures.frame import Drawing, Frame, key, picture, step_axis
from gradsync.report.table import Table
from gradsync.units import show_seconds

# All in px.
_TOP, _FOOT = 6, 24
_ROW, _LOW_ROW = 20, 12  # with few ranks and with many

_MOST_COLUMNS, _MOST_ROWS = 100, 40
_SHADES = 5
_WORTH = 0.25  # of a step: the darkest shade is at least this late, or noise would look like a fault


def draw_heat(table: Table, late: dict[tuple[int, int], LateRank]) -> str:
    """The figure with its key and caption; empty if there were not two ranks to compare."""
    columns = bins(
        [step for step in table.judged() if any((step, rank) in late for rank in table.ranks)], _MOST_COLUMNS
    )
    if len(table.ranks) < 2 or not columns:
        return ""
    ranks = _latest(table.ranks, columns, late)
    cells = [[_mean_late(rank, column, late) for column in columns] for rank in ranks]
    darkest_s = max(
        _WORTH * quantile([cell.step_s for step in table.steps for cell in table.rows[step].values()], 0.5),
        quantile([cell for row in cells for cell in row if cell is not None], 0.98),
    )
    height = _ROW if len(ranks) <= 12 else _LOW_ROW
    foot = _TOP + height * len(ranks)

    def draw(frame: Frame) -> Drawing:
        parts: list[str] = []
        for number, (rank, row) in enumerate(zip(ranks, cells, strict=True)):
            parts += _row(frame, rank, columns, row, darkest_s, (_TOP + height * number, height))
        parts += step_axis(frame, [column[0] for column in columns], columns[-1][-1], foot + 16)
        return foot + _FOOT, parts

    label = f"Lateness of {len(ranks)} ranks in {steps(columns[0][0], columns[-1][-1])}"
    drawing = picture("heat", label, draw)
    return f"{drawing}{_key(darkest_s)}<p>{_caption(table, ranks, columns)}</p>"


def _latest(ranks: Sequence[int], columns: Sequence[Sequence[int]], late: dict[tuple[int, int], LateRank]) -> list[int]:
    if len(ranks) <= _MOST_ROWS:
        return list(ranks)
    every = [step for column in columns for step in column]
    order = sorted(ranks, key=lambda rank: (-(_mean_late(rank, every, late) or 0.0), rank))
    return sorted(order[:_MOST_ROWS])


def _mean_late(rank: int, column: Sequence[int], late: dict[tuple[int, int], LateRank]) -> float | None:
    found = [max(0.0, late[step, rank].late_s) for step in column if (step, rank) in late]
    return mean(found) if found else None


def _row(
    frame: Frame,
    rank: int,
    columns: Sequence[Sequence[int]],
    row: Sequence[float | None],
    darkest_s: float,
    at: tuple[float, float],
) -> Iterator[str]:
    y, height = at
    yield svg.text("y", frame.left - 10, y + height / 2 + 4, f"rank {rank}")
    yield svg.rect("on-time", frame.left, y, frame.plot, height - 2)
    width = frame.plot / len(columns)
    for index, (column, late_s) in enumerate(zip(columns, row, strict=True)):
        x = frame.left + width * index
        if late_s is None:
            yield svg.rect("absent", x, y, width, height - 2)
        elif shade := _shade(late_s, darkest_s):
            says = f"rank {rank}, {steps(column[0], column[-1])}: {show_seconds(late_s)} late"
            yield svg.rect(f"h{shade}", x, y, width - (0.6 if width > 4 else 0), height - 2, frame.tip(says))


def _shade(late_s: float, darkest_s: float) -> int:
    return min(_SHADES, int((_SHADES + 0.5) * late_s / darkest_s)) if darkest_s > 0 else 0


def _key(darkest_s: float) -> str:
    entries = [("on-time", "on time")]
    for shade in range(1, _SHADES + 1):
        at = darkest_s * shade / (_SHADES + 0.5)
        entries.append((f"h{shade}", f"≥ {show_seconds(at)}" if shade in (1, _SHADES) else ""))
    return key(*entries)


def _caption(table: Table, ranks: Sequence[int], columns: Sequence[Sequence[int]]) -> str:
    said = "How much longer than the others a rank worked before it could begin to wait."
    most = max(len(column) for column in columns)
    if most > 1:
        said += f" Each cell is the mean of up to {most} steps."
    if len(ranks) < len(table.ranks):
        said += f" Of {len(table.ranks)} ranks the {len(ranks)} latest are shown."
    return said
