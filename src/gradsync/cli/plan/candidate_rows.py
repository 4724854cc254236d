"""The table of candidates: a line of figures for each, and one that says why, on a terminal of any width.

plan                     step   nine in ten  overhead  saves
exact (the default)      59 s   30.7–87.3 s      >99 %
  58.9 s of communication stick out of backward
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.text import Text

from gradsync.cli.plan.answer import Answer, saving
from gradsync.cli.plan.figures import show_saving, show_share, show_span
from gradsync.cli.plan.one_line import offers
from gradsync.plan.sync_plan import Plan
from gradsync.planner.prediction import Prediction
from gradsync.planner.snippet import in_words
from gradsync.units import show_nbytes, show_seconds

_SHOWN = 4  # of each group
_GAP = "  "
_HEADS = ("step", "nine in ten", "overhead", "saves")
_MORE_HEADS = ("exposed", "sent", "memory")
_WIDE = 100  # letters from which on there is room for these


def table(answer: Answer, width: int) -> list[Text]:
    """The best of each group, the chosen plan on top; the default is always among them."""
    heads = _HEADS + (_MORE_HEADS if width >= _WIDE else ())
    shown = [(title, _shown(group, answer)) for title, group in groups(answer)]
    rows = {id(it): _figures(it, answer)[: len(heads)] for _, group in shown for it in group}
    widths = [max(len(head), *(len(row[place]) for row in rows.values())) for place, head in enumerate(heads)]
    room = width - sum(widths) - len(_GAP) * len(widths)
    lines = [_line(Text("plan"), heads, widths, room, "bold underline")]
    for title, group in shown:
        lines.append(_cut(Text(title, style="bold"), width))
        for it in group:
            lines.append(_line(_name(it, answer), rows[id(it)], widths, room))
            if it.reason:
                lines.append(_cut(Text(f"{_GAP}{it.reason}", style="dim"), width))
    return lines


def groups(answer: Answer) -> list[tuple[str, tuple[Prediction, ...]]]:
    """Candidates by what they do to training, with a title each; empty groups are left out."""
    named = [
        ("trains the same: exact, or rounded to 16 bits", answer.same),
        ("lossy: gradients lose something on the way", answer.lossy),
        ("trains differently: seldom, late or from larger batches", answer.other),
    ]
    named.sort(key=lambda group: answer.chosen not in group[1])
    return [(title, group) for title, group in named if group]


def left_out(answer: Answer) -> int:
    """Return how many candidates the table does not show."""
    return len(answer.candidates) - sum(len(_shown(group, answer)) for _, group in groups(answer))


def footnote(width: int = _WIDE) -> str:
    """Return a footnote on what the columns mean."""
    parts = ["nine in ten: steps should lie there", "overhead: the share of the step that synchronization takes"]
    parts.append("saves: of the chosen plan's step")
    if width >= _WIDE:
        parts += ["exposed: by how much it makes a step longer", "sent: by each rank to others, per step"]
        parts.append("memory: on each rank, for buckets, residuals and copies")
    told = f"{'. '.join(parts)}. Steps of accumulate(k) are micro-batches."
    return told if width >= _WIDE else f"{told} On {_WIDE} columns there are exposed, sent and memory, too."


def _shown(group: Sequence[Prediction], answer: Answer) -> list[Prediction]:
    """The first few, each with its best bucket size only; also those that are spoken of."""
    kinds: dict[Plan, Prediction] = {}
    for it in group:
        kinds.setdefault(replace(it.plan, bucket_bytes=None), it)
    spoken_of = (answer.usual, *offers(answer))
    first = {id(it) for it in [*list(kinds.values())[:_SHOWN], *spoken_of]}
    return [it for it in group if id(it) in first]


def _name(candidate: Prediction, answer: Answer) -> Text:
    usual = " (the default)" if candidate is answer.usual else ""
    return Text(in_words(candidate.plan) + usual, style="bold" if candidate is answer.chosen else "")


def _figures(candidate: Prediction, answer: Answer) -> list[str]:
    return [
        show_seconds(candidate.step_s),
        show_span(candidate.low_s, candidate.high_s),
        show_share(candidate.overhead),
        "" if candidate is answer.chosen else show_saving(saving(candidate, answer.chosen)),
        show_seconds(candidate.exposed_s) if candidate.exposed_s else "0",
        show_nbytes(candidate.nbytes),
        show_nbytes(candidate.memory_nbytes),
    ]


def _line(name: Text, cells: Sequence[str], widths: Sequence[int], room: int, style: str = "") -> Text:
    figures = "".join(f"{_GAP}{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    line = _cut(name, room)
    line.append(" " * (room - line.cell_len) + figures)
    line.stylize(style)
    return line


def _cut(text: Text, width: int) -> Text:
    text.truncate(width, overflow="ellipsis")
    return text
