"""A schedule to look at: a line of text per round, or ranks as lines and transfers as arrows in an SVG."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple, get_args

from gradsync.algorithms.schedule import Round, Schedule

Form = Literal["text", "svg"]

# All in px. A round is a column: labels in a gutter on its left, each beside the tail of its arrow.
_LEFT, _TOP, _ARROW, _EDGE = 64, 76, 72, 8
_LINE, _CHAR = 13, 7  # a label's height, and the width of one of its characters
_SINK = 4  # from the middle of a line of text to its foot
_LONGEST = 11  # characters of a label; the rest shows when one points at the arrow

_STYLE = """
text { font: 12px sans-serif; fill: #333; text-anchor: middle }
.title { font-weight: bold; text-anchor: start } .rank, .key { text-anchor: start }
.band { fill: #f3f5f8 } .line { stroke: #b8bec8 } .add, .copy { fill: none; stroke-width: 1.6 }
.add { stroke: #1565c0 } .copy { stroke: #c75b00; stroke-dasharray: 5 3 }
.add-label, .copy-label { font-size: 11px; font-weight: bold; text-anchor: end }
.add-label, .copy-label { stroke: #fff; stroke-width: 4px; paint-order: stroke }
.add-label, .add-head { fill: #1565c0 } .copy-label, .copy-head { fill: #c75b00 }
""".strip()


class _Message(NamedTuple):
    """What one rank sends another in one round, to be added or to be kept."""

    src: int
    dst: int
    add: bool
    chunks: str  # "0-3" or "0-1,4"


def draw(schedule: Schedule, form: Form = "text") -> str:
    """Show every transfer: `+` and solid blue are added, `=` and dashed orange replace.

    >>> from gradsync.algorithms.draw import draw
    >>> from gradsync.algorithms.ring import ring
    >>> print(draw(ring().schedule(2)))
    2 ranks, 2 chunks, 2 rounds; +c: add chunk c, =c: replace it
    round 1  0→1 +1  1→0 +0
    round 2  0→1 =0  1→0 =1
    """
    if form not in get_args(Form):
        raise ValueError(f'form must be "text" or "svg", got {form!r}')
    return _text(schedule) if form == "text" else _svg(schedule)


def _text(schedule: Schedule) -> str:
    width = len(str(len(schedule.rounds)))
    lines = [f"{_summary(schedule)}; +c: add chunk c, =c: replace it"]
    for number, transfers in enumerate(schedule.rounds, 1):
        shown = (f"{m.src}→{m.dst} {'+' if m.add else '='}{m.chunks}" for m in _messages(transfers))
        lines.append(f"round {number:>{width}}  {'  '.join(shown)}".rstrip())
    return "\n".join(lines)


def _svg(schedule: Schedule) -> str:
    columns = [_by_sender(transfers) for transfers in schedule.rounds]
    sheet = _Sheet.fitting(columns)
    width = max(_LEFT + len(columns) * sheet.column + 16, 560)
    height = _TOP + schedule.world_size * sheet.row
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<style>{_STYLE}</style>",
        "<defs>",
        *_heads(),
        "</defs>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text class="title" x="12" y="22">{_summary(schedule)}</text>',
        *_key(),
    ]
    for column in range(len(columns)):
        left = _LEFT + column * sheet.column
        if column % 2 == 0:
            parts.append(f'<rect class="band" x="{left}" y="{_TOP - 34}" width="{sheet.column}" height="{height}"/>')
        parts.append(f'<text x="{left + sheet.column / 2:g}" y="{_TOP - 22}">round {column + 1}</text>')
    for rank in range(schedule.world_size):
        y = sheet.y(rank)
        parts.append(f'<text class="rank" x="12" y="{y + _SINK:g}">rank {rank}</text>')
        parts.append(f'<line class="line" x1="{_LEFT - 6}" y1="{y:g}" x2="{width - 8}" y2="{y:g}"/>')
    for column, senders in enumerate(columns):
        for messages in senders:
            for index, message in enumerate(messages):
                parts += sheet.arrow(column, message, (index - (len(messages) - 1) / 2) * _LINE)
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Sheet(NamedTuple):
    """How wide a round and how high a rank must be, so that no label covers another."""

    column: int
    row: int

    @classmethod
    def fitting(cls, columns: Sequence[Sequence[Sequence[_Message]]]) -> _Sheet:
        longest = max((len(_label(m)) for senders in columns for messages in senders for m in messages), default=1)
        most = max((len(messages) for senders in columns for messages in senders), default=1)
        return cls(column=longest * _CHAR + _ARROW + 2 * _EDGE, row=max(40, (most + 1) * _LINE))

    def y(self, rank: int) -> float:
        return _TOP + (rank + 0.5) * self.row - 8

    def arrow(self, column: int, m: _Message, below: float) -> tuple[str, str]:
        """An arrow that begins `below` its sender's line, and the label beside its tail."""
        end = _LEFT + (column + 1) * self.column - _EDGE
        begin, y1, y2 = end - _ARROW, self.y(m.src) + below, self.y(m.dst)
        kind = "add" if m.add else "copy"
        says = f"round {column + 1}: rank {m.src} → rank {m.dst}, {kind} chunk {m.chunks}"
        return (
            f'<path class="{kind}" d="M{begin} {y1:g}L{end} {y2:g}" marker-end="url(#{kind}-head)" '
            f'data-round="{column + 1}" data-src="{m.src}" data-dst="{m.dst}" data-chunks="{m.chunks}">'
            f"<title>{says}</title></path>",
            f'<text class="{kind}-label" x="{begin - 3}" y="{y1 + _SINK:g}">{_label(m)}</text>',
        )


def _label(m: _Message) -> str:
    return m.chunks if len(m.chunks) <= _LONGEST else m.chunks[: _LONGEST - 1] + "…"


def _by_sender(transfers: Round) -> list[list[_Message]]:
    """The messages of each sender, from the topmost receiver to the lowest: their arrows do not cross."""
    messages = sorted(_messages(transfers), key=lambda m: (m.src, m.dst))
    return [list(group) for _, group in groupby(messages, key=lambda m: m.src)]


def _heads() -> Iterator[str]:
    for kind in ("add", "copy"):
        yield (
            f'<marker id="{kind}-head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9" '
            f'markerUnits="userSpaceOnUse" orient="auto"><path class="{kind}-head" d="M0 0L8 4L0 8z"/></marker>'
        )


def _key() -> Iterator[str]:
    for kind, x, says in (("add", 300, "added"), ("copy", 410, "replaces")):
        yield f'<path class="{kind}" d="M{x} 18h36" marker-end="url(#{kind}-head)"/>'
        yield f'<text class="key" x="{x + 44}" y="22">{says}</text>'


def _messages(transfers: Round) -> Iterator[_Message]:
    chunks_of: dict[tuple[int, int, bool], list[int]] = defaultdict(list)
    for t in transfers:
        chunks_of[t.src, t.dst, t.add].append(t.chunk)
    for (src, dst, add), chunks in chunks_of.items():
        yield _Message(src, dst, add, _runs(chunks))


def _runs(chunks: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for chunk in chunks:
        if runs and chunk == runs[-1][1] + 1:
            runs[-1][1] = chunk
        else:
            runs.append([chunk, chunk])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _summary(schedule: Schedule) -> str:
    def counted(number: int, noun: str) -> str:
        return f"{number} {noun}" if number == 1 else f"{number} {noun}s"

    named = ((schedule.world_size, "rank"), (schedule.num_chunks, "chunk"), (len(schedule.rounds), "round"))
    return ", ".join(counted(number, noun) for number, noun in named)
