"""One step of every rank as a picture: what it computed, what travelled meanwhile, and where it waited.

rank 0   ▓ input ▓ forward ▓▓ backward ▓▓▓▓▓▓░░ wait ░░░
                        ▒ 0 ▒▒  ▒ 1 ▒▒   ▒▒ 2 ██████████    █ exposed: nothing to compute meanwhile
rank 1   ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gradsync import svg
from gradsync.report.lateness import LateRank
from gradsync.report.pictures.binning import bins, round_up
from gradsync.report.pictures.escape import shown
from gradsync.report.pictures.frame import Drawing, Frame, key, picture
from gradsync.report.table import Table
from gradsync.report.typical_step import TypicalStep, typical_step
from gradsync.report.wording import show_share
from gradsync.trace.lines import BucketTimes, StepLine, arrived_by
from gradsync.units import show_nbytes, show_seconds

PHASES = ("optimizer", "input", "forward", "backward", "wait")

# All in px.
_TOP, _COMPUTE, _LANE, _GAP = 6, 24, 15, 16
_LETTER = 7  # of a label, about

_MOST_RANKS, _MOST_BARS, _MOST_LANES = 8, 48, 4
_MOST_PHASES = 64  # a step has five; a hostile file may say more


class BucketTransfer(NamedTuple):
    """A bucket (or several neighbours) under way, as drawn."""

    start: float
    stop: float
    label: str
    nbytes: int


def draw_timeline(table: Table, late: dict[tuple[int, int], LateRank]) -> str:
    """The figure with its key and caption; empty if no step can be drawn."""
    usual = typical_step(table)
    if usual is None:
        return ""
    step = usual.step
    cells = {rank: cell for rank in table.ranks if (cell := table.cell(step, rank)) is not None}
    lateness = {rank: late[step, rank].late_s for rank in cells if (step, rank) in late}
    ranks = _telling(list(cells), lateness)
    until_s = max((_length(cells[rank]) for rank in ranks), default=0.0)
    if until_s <= 0:
        return ""
    rows = {rank: _lanes(_transfers(cells[rank].buckets or [])) for rank in ranks}

    def draw(frame: Frame) -> Drawing:
        parts: list[str] = []
        y: float = _TOP
        for rank in ranks:
            parts += _rank(frame, rank, cells[rank], rows[rank], y, until_s)
            y += _COMPUTE + _LANE * len(rows[rank]) + _GAP
        return y + 22, [*parts, *_axis(frame, y, until_s)]

    label = f"Timeline of step {step}: computation and communication of {len(ranks)} ranks"
    drawing = picture("timeline", label, draw)
    shown_cells = [cells[rank] for rank in ranks]
    return f"{drawing}{_key(shown_cells)}<p>{_caption(usual, ranks, cells)}</p>"


def _telling(ranks: list[int], lateness: dict[int, float]) -> list[int]:
    """The latest ranks, and rank 0."""
    if len(ranks) <= _MOST_RANKS:
        return ranks
    order = sorted(ranks, key=lambda rank: (rank != ranks[0], -lateness.get(rank, 0.0)))
    return sorted(order[:_MOST_RANKS])


def _length(step: StepLine) -> float:
    return max([step.step_s, *(phase.stop for phase in step.phases[:_MOST_PHASES])])


def _transfers(buckets: Sequence[BucketTimes]) -> list[BucketTransfer]:
    known = [b for b in buckets if arrived_by(b) is not None and (b.launched is not None or b.sent is not None)]
    known.sort(key=lambda b: (_start(b), b.bucket))
    found = []
    for group in bins(known, _MOST_BARS):
        first, last = group[0].bucket, group[-1].bucket
        label = str(first) if len(group) == 1 else f"{first}–{last}"
        stop = max(arrived_by(b) or 0.0 for b in group)
        found.append(BucketTransfer(_start(group[0]), stop, label, sum(b.nbytes for b in group)))
    return found


def _start(bucket: BucketTimes) -> float:
    return bucket.launched if bucket.launched is not None else bucket.sent or 0.0


def _lanes(travels: Sequence[BucketTransfer]) -> list[list[BucketTransfer]]:
    """Transfers that overlap lie below each other; the last lane takes what is left."""
    lanes: list[list[BucketTransfer]] = []
    for transfer in travels:
        free = next((lane for lane in lanes if lane[-1].stop <= transfer.start), None)
        if free is None and len(lanes) < _MOST_LANES:
            lanes.append([transfer])
        else:
            (lanes[-1] if free is None else free).append(transfer)
    return lanes


def _rank(
    frame: Frame, rank: int, step: StepLine, lanes: list[list[BucketTransfer]], y: float, until_s: float
) -> Iterator[str]:
    yield svg.text("y strong", frame.left - 10, y + 16, f"rank {rank}")
    for phase in step.phases[:_MOST_PHASES]:
        kind = phase.name if phase.name in PHASES else "other"
        says = f"rank {rank}, {shown(phase.name, 40)}: {_span(phase.start, phase.stop)}"
        yield from _bar(frame, kind, phase.start, phase.stop, (y, _COMPUTE), until_s, says, kind)
    wait = [(phase.start, phase.stop) for phase in step.phases[:_MOST_PHASES] if phase.name == "wait"]
    for number, lane in enumerate(lanes):
        top = y + _COMPUTE + 3 + _LANE * number
        for transfer in lane:
            yield from _transfer(frame, rank, transfer, wait, top, until_s)


def _transfer(
    frame: Frame, rank: int, transfer: BucketTransfer, wait: list[tuple[float, float]], y: float, until_s: float
) -> Iterator[str]:
    """The bar, and over it in red what of it was exposed."""
    exposed = [(max(transfer.start, start), min(transfer.stop, stop)) for start, stop in wait]
    exposed = [(start, stop) for start, stop in exposed if stop > start]
    tail = f", of it {show_seconds(sum(stop - start for start, stop in exposed))} exposed" if exposed else ""
    span = _span(transfer.start, transfer.stop)
    says = f"rank {rank}, bucket {transfer.label}: {span}, {show_nbytes(transfer.nbytes)}{tail}"
    tall = (y, _LANE - 3)
    yield from _bar(
        frame, "wire", transfer.start, transfer.stop, tall, until_s, says, "" if exposed else transfer.label
    )
    for start, stop in exposed:
        yield from _bar(frame, "exposed", start, stop, tall, until_s, says, transfer.label)


def _bar(
    frame: Frame,
    kind: str,
    start: float,
    stop: float,
    tall: tuple[float, float],
    until_s: float,
    says: str,
    label: str,
) -> Iterator[str]:
    left, right = frame.x_at(_share(start, until_s)), frame.x_at(_share(stop, until_s))
    y, height = tall
    yield svg.rect(kind, left, y, right - left - 0.6, height, frame.tip(says))
    if label and right - left > _LETTER * len(label) + 6:
        yield svg.text(f"x on-{kind}", (left + right) / 2, y + height / 2 + 4, label)


def _axis(frame: Frame, y: float, until_s: float) -> Iterator[str]:
    yield svg.line("grid", frame.left, y - 6, frame.end, y - 6)
    tick = round_up(until_s / frame.ticks)
    for part in range(int(until_s / tick) + 1):
        x = frame.x_at(_share(part * tick, until_s))
        yield svg.line("grid", x, y - 6, x, y - 1)
        if x < frame.end - 16:
            yield svg.text("pale x", x, y + 13, show_seconds(part * tick) if part else "0")


def _key(cells: Sequence[StepLine]) -> str:
    entries = [(name, name) for name in PHASES[:-1]] + [("wait", "waits: nothing left to compute")]
    if not any(cell.exact_input for cell in cells):
        entries[1] = ("input", "input, or whatever else comes before forward")
    if any(cell.buckets for cell in cells):
        entries += [("wire", "bucket under way, hidden"), ("exposed", "bucket under way, exposed")]
    return key(*entries)


def _caption(usual: TypicalStep, ranks: Sequence[int], cells: dict[int, StepLine]) -> str:
    said = f"{_which(usual)} Time 0 is the end of the synchronization before it."
    if len(ranks) < len(cells):
        said += f" Of {len(cells)} ranks these {len(ranks)} are shown: rank {ranks[0]}, and those that were latest."
    most = max(len(cells[rank].buckets or ()) for rank in ranks)
    if most > _MOST_BARS:
        said += f" The {most} buckets of a rank are drawn in groups of {-(-most // _MOST_BARS)}."
    if not most:
        said += " Buckets were not recorded in it."
    return said


def _which(usual: TypicalStep) -> str:
    """Say which step it is, and how usual."""
    said = f"Step {usual.step} took {show_seconds(usual.step_s)}"
    if usual.num_steps < 2:
        return f"{said}."
    said += (
        f"; the median of the last {usual.num_steps} steps is {show_seconds(usual.median_s)}, and "
        f"{show_share(usual.shorter)} of them were shorter."
    )
    if usual.detailed:
        recorded = "one of them was" if usual.num_detailed == 1 else f"{usual.num_detailed} of them were"
        how = "the latest near the median" if usual.latest else "the nearest to the median"
        return f"{said} Of those recorded bucket by bucket ({recorded}) it is {how}."
    if usual.nearest_detailed is not None:
        step, step_s = usual.nearest_detailed
        said += (
            f" None of the {usual.num_detailed} recorded bucket by bucket was as long as most: the nearest is step "
            f"{step} with {show_seconds(step_s)}."
        )
    return said


def _span(start: float, stop: float) -> str:
    return f"{show_seconds(stop - start)} ({show_seconds(start)} to {show_seconds(stop)})"


def _share(at_s: float, until_s: float) -> float:
    return min(1.0, max(0.0, at_s / until_s))
