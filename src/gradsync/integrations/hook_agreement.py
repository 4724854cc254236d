"""Ranks compare what they are about to do together where a hook has no header for it."""

from __future__ import annotations

from typing import Any

from gradsync.agreement.documents import Document, agree, majority
from gradsync.transport.lane import Lane


def compare(lane: Lane, doing: str, **details: Any) -> None:
    """Return if all ranks are about to do the same; otherwise raise the same `Disagreement` on all."""
    agree(lane, {"doing": doing, **details}, lambda documents, ranks: f"{lane.place()} {explain(documents, ranks)}")


def explain(documents: list[Document], ranks: list[int]) -> str:
    """The first difference, as one sentence.

    >>> print(explain([{"doing": "bucket 0", "step": 4}, {"doing": "close()"}], [0, 1]))
    the ranks do different things: it is bucket 0 on rank 0 but close() on rank 1; do the same on every rank
    """
    for key in documents[0]:
        values = [document.get(key) for document in documents]
        if any(value != values[0] for value in values):
            usual, those, other, these = majority(values, ranks)
            what = "the ranks do different things: it" if key == "doing" else f"{documents[0]['doing']}: the {key}"
            return f"{what} is {usual} on {those} but {other} on {these}; do the same on every rank"
    raise AssertionError("the documents do not differ")
