"""A schedule to look at: a line of text per round, or ranks as lines and transfers as arrows in an SVG."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple, get_args

from gradsync import svg
from gradsync.algorithms.schedule import Round, Schedule

Form = Literal["text", "svg"]

# All in px. A round is a column: labels in a gutter on its left, each beside the tail of its arrow.
_LEFT, _TOP, _ARROW, _EDGE = 64, 76, 72, 8
_LINE, _CHAR = 13, 7  # a label's height, and the width of one of its characters
_SINK = 4  # from the middle of a line of text to its foot
_LONGEST = 11  # characters of a label; the rest shows when one points at the arrow

_STYLE = """
text { font: 12px sans-serif; fill: #333; text-anchor: middle }
.page { fill: #fff } .title { font-weight: bold; text-anchor: start } .rank, .key { text-anchor: start }
.band { fill: #f3f5f8 } .line { stroke: #b8bec8 } .add, .copy { fill: none; stroke-width: 1.6 }
.add { stroke: #1565c0; marker-end: url(#add-head) }
.copy { stroke: #c75b00; marker-end: url(#copy-head); stroke-dasharray: 5 3 }
.add-label, .copy-label { font-size: 11px; font-weight: bold; text-anchor: end }
.add-label, .copy-label { stroke: #fff; stroke-width: 4px; paint-order: stroke }
.add-label, .add-head { fill: #1565c0 } .copy-label, .copy-head { fill: #c75b00 }
""".strip()


class _Message(NamedTuple):
    """A message from one rank to another in one round, to be added or to be kept."""

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
    grid = _Grid.fitting(columns)
    width = max(_LEFT + len(columns) * grid.column + 16, 560)
    height = _TOP + schedule.world_size * grid.row
    parts = [svg.text("title", 12, 22, _summary(schedule)), *_key()]
    for column in range(len(columns)):
        left = _LEFT + column * grid.column
        if column % 2 == 0:
            parts.append(svg.rect("band", left, _TOP - 34, grid.column, height))
        parts.append(svg.text("", left + grid.column / 2, _TOP - 22, f"round {column + 1}"))
    for rank in range(schedule.world_size):
        y = grid.y(rank)
        parts.append(svg.text("rank", 12, y + _SINK, f"rank {rank}"))
        parts.append(svg.line("line", _LEFT - 6, y, width - 8, y))
    for column, senders in enumerate(columns):
        for messages in senders:
            for index, message in enumerate(messages):
                parts += grid.arrow(column, message, (index - (len(messages) - 1) / 2) * _LINE)
    return svg.document(width, height, _STYLE, parts)


class _Grid(NamedTuple):
    """The width of a round and the height of a rank, so that no label covers another."""

    column: int
    row: int

    @classmethod
    def fitting(cls, columns: Sequence[Sequence[Sequence[_Message]]]) -> _Grid:
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
        data = {"round": column + 1, "src": m.src, "dst": m.dst, "chunks": m.chunks}
        return (
            svg.path(kind, [(begin, y1), (end, y2)], says=says, data=data),
            svg.text(f"{kind}-label", begin - 3, y1 + _SINK, _label(m)),
        )


def _label(m: _Message) -> str:
    return m.chunks if len(m.chunks) <= _LONGEST else m.chunks[: _LONGEST - 1] + "…"


def _by_sender(transfers: Round) -> list[list[_Message]]:
    """The messages of each sender, from the topmost receiver to the lowest: their arrows do not cross."""
    messages = sorted(_messages(transfers), key=lambda m: (m.src, m.dst))
    return [list(group) for _, group in groupby(messages, key=lambda m: m.src)]


def _key() -> Iterator[str]:
    for kind, x, says in (("add", 300, "added"), ("copy", 410, "replaces")):
        yield svg.arrow_head(f"{kind}-head")
        yield svg.path(kind, [(x, 18), (x + 36, 18)])
        yield svg.text("key", x + 44, 22, says)


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
