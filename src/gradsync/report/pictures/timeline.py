"""One step of every rank as a picture: what it computed, what travelled meanwhile, and where it waited.

rank 0   ▓ input ▓ forward ▓▓ backward ▓▓▓▓▓▓░░ wait ░░░
                        ▒ 0 ▒▒  ▒ 1 ▒▒   ▒▒ 2 ██████████    █ exposed: nothing to compute meanwhile
rank 1   ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gradsync.report.lateness import Late
from gradsync.report.pictures import svg
from gradsync.report.pictures.sampling import bins, quantile, round_up
from gradsync.report.pictures.words import shown
from gradsync.report.table import Table
from gradsync.trace.lines import BucketTimes, Step
from gradsync.units import show_nbytes, show_seconds

PHASES = ("optimizer", "input", "forward", "backward", "wait")

# All in px.
_TOP, _COMPUTE, _LANE, _GAP = 6, 24, 15, 16
_LETTER = 7  # of a label, about

_MOST_RANKS, _MOST_BARS, _MOST_LANES = 8, 48, 4
_MOST_PHASES = 64  # a step has five; a hostile file may say more
_RECENT = 10  # detailed steps among which the usual one is looked for


class Travel(NamedTuple):
    """A bucket (or several neighbours) under way, as drawn."""

    start: float
    stop: float
    label: str
    nbytes: int


def draw_timeline(table: Table, late: dict[tuple[int, int], Late]) -> str:
    """The figure with its key and caption; empty if no step can be drawn."""
    step = usual_step(table)
    if step is None:
        return ""
    cells = {rank: cell for rank in table.ranks if (cell := table.cell(step, rank)) is not None}
    lateness = {rank: late[step, rank].late_s for rank in cells if (step, rank) in late}
    ranks = _telling(list(cells), lateness)
    until_s = max((_length(cells[rank]) for rank in ranks), default=0.0)
    if until_s <= 0:
        return ""
    parts: list[str] = []
    y: float = _TOP
    for rank in ranks:
        rows = _lanes(_travels(cells[rank].buckets or []))
        parts += _rank(rank, cells[rank], rows, y, until_s)
        y += _COMPUTE + _LANE * len(rows) + _GAP
    label = f"Timeline of step {step}: computation and communication of {len(ranks)} ranks"
    drawing = svg.picture("timeline", y + 22, [*parts, *_axis(y, until_s)], label)
    return f"{drawing}{_key(any(cells[rank].buckets for rank in ranks))}<p>{_caption(step, ranks, cells)}</p>"


def usual_step(table: Table) -> int | None:
    """The step to show: of the latest with buckets on most ranks, the one of the most usual length."""
    lengths: dict[int, float] = {}
    plain: dict[int, float] = {}
    for step in reversed(table.steps):
        cells = [cell for rank in table.ranks if (cell := table.cell(step, rank)) is not None and cell.phases]
        if 2 * len(cells) >= len(table.ranks) and cells:
            length = max(_length(cell) for cell in cells)
            plain[step] = length
            if 2 * sum(cell.buckets is not None for cell in cells) >= len(cells):
                lengths[step] = length
        if len(lengths) >= _RECENT or (len(plain) >= 20 * _RECENT and not lengths):
            break
    found = lengths or plain
    if len(found) > 2:  # the first step is unlike the others
        found.pop(table.steps[0], None)
    usual = quantile(found.values(), 0.5)
    return min(found, key=lambda step: (abs(found[step] - usual), -step)) if found else None


def _telling(ranks: list[int], lateness: dict[int, float]) -> list[int]:
    """The latest ranks, and rank 0."""
    if len(ranks) <= _MOST_RANKS:
        return ranks
    order = sorted(ranks, key=lambda rank: (rank != ranks[0], -lateness.get(rank, 0.0)))
    return sorted(order[:_MOST_RANKS])


def _length(step: Step) -> float:
    return max([step.step_s, *(phase.stop for phase in step.phases[:_MOST_PHASES])])


def _travels(buckets: Sequence[BucketTimes]) -> list[Travel]:
    known = [b for b in buckets if b.done is not None and (b.launched is not None or b.sent is not None)]
    known.sort(key=lambda b: (_start(b), b.bucket))
    found = []
    for group in bins(known, _MOST_BARS):
        first, last = group[0].bucket, group[-1].bucket
        label = str(first) if len(group) == 1 else f"{first}–{last}"
        stop = max(b.done for b in group if b.done is not None)
        found.append(Travel(_start(group[0]), stop, label, sum(b.nbytes for b in group)))
    return found


def _start(bucket: BucketTimes) -> float:
    return bucket.launched if bucket.launched is not None else bucket.sent or 0.0


def _lanes(travels: Sequence[Travel]) -> list[list[Travel]]:
    """Those that overlap below each other; the last lane takes what is left."""
    lanes: list[list[Travel]] = []
    for travel in travels:
        free = next((lane for lane in lanes if lane[-1].stop <= travel.start), None)
        if free is None and len(lanes) < _MOST_LANES:
            lanes.append([travel])
        else:
            (lanes[-1] if free is None else free).append(travel)
    return lanes


def _rank(rank: int, step: Step, lanes: list[list[Travel]], y: float, until_s: float) -> Iterator[str]:
    yield svg.text("y strong", svg.LEFT - 10, y + 16, f"rank {rank}")
    for phase in step.phases[:_MOST_PHASES]:
        kind = phase.name if phase.name in PHASES else "other"
        says = f"rank {rank}, {shown(phase.name, 40)}: {_span(phase.start, phase.stop)}"
        yield from _bar(kind, phase.start, phase.stop, (y, _COMPUTE), until_s, says, kind)
    wait = [(phase.start, phase.stop) for phase in step.phases[:_MOST_PHASES] if phase.name == "wait"]
    for number, lane in enumerate(lanes):
        top = y + _COMPUTE + 3 + _LANE * number
        for travel in lane:
            yield from _travel(rank, travel, wait, top, until_s)


def _travel(rank: int, travel: Travel, wait: list[tuple[float, float]], y: float, until_s: float) -> Iterator[str]:
    """The bar, and over it in red what of it was exposed."""
    exposed = [(max(travel.start, start), min(travel.stop, stop)) for start, stop in wait]
    exposed = [(start, stop) for start, stop in exposed if stop > start]
    tail = f", of it {show_seconds(sum(stop - start for start, stop in exposed))} exposed" if exposed else ""
    span = _span(travel.start, travel.stop)
    says = f"rank {rank}, bucket {travel.label}: {span}, {show_nbytes(travel.nbytes)}{tail}"
    tall = (y, _LANE - 3)
    yield from _bar("wire", travel.start, travel.stop, tall, until_s, says, "" if exposed else travel.label)
    for start, stop in exposed:
        yield from _bar("exposed", start, stop, tall, until_s, says, travel.label)


def _bar(
    kind: str, start: float, stop: float, tall: tuple[float, float], until_s: float, says: str, label: str
) -> Iterator[str]:
    left, right = svg.x_at(_share(start, until_s)), svg.x_at(_share(stop, until_s))
    y, height = tall
    yield svg.rect(kind, left, y, right - left - 0.6, height, says)
    if label and right - left > _LETTER * len(label) + 6:
        yield svg.text(f"x on-{kind}", (left + right) / 2, y + height / 2 + 4, label)


def _axis(y: float, until_s: float) -> Iterator[str]:
    yield svg.line("grid", svg.LEFT, y - 6, svg.WIDTH - svg.RIGHT, y - 6)
    tick = round_up(until_s / 8)
    for part in range(int(until_s / tick) + 1):
        x = svg.x_at(_share(part * tick, until_s))
        yield svg.line("grid", x, y - 6, x, y - 1)
        if x < svg.WIDTH - svg.RIGHT - 16:
            yield svg.text("pale x", x, y + 13, show_seconds(part * tick) if part else "0")


def _key(with_buckets: bool) -> str:
    entries = [(name, name) for name in PHASES[:-1]] + [("wait", "waits: nothing left to compute")]
    if with_buckets:
        entries += [("wire", "bucket under way, hidden"), ("exposed", "bucket under way, exposed")]
    return svg.key(*entries)


def _caption(step: int, ranks: Sequence[int], cells: dict[int, Step]) -> str:
    said = f"Step {step}, as long as most. Time 0 is the end of the synchronization before it."
    if len(ranks) < len(cells):
        said += f" Of {len(cells)} ranks these {len(ranks)} are shown: rank {ranks[0]}, and those that were latest."
    most = max(len(cells[rank].buckets or ()) for rank in ranks)
    if most > _MOST_BARS:
        said += f" The {most} buckets of a rank are drawn in groups of {-(-most // _MOST_BARS)}."
    if not most:
        said += " Buckets were not recorded in it."
    return said


def _span(start: float, stop: float) -> str:
    return f"{show_seconds(stop - start)} ({show_seconds(start)} to {show_seconds(stop)})"


def _share(at_s: float, until_s: float) -> float:
    return min(1.0, max(0.0, at_s / until_s))
