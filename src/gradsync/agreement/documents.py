"""Agreement at attach: every rank brings a document, and all go on or all raise the same error.

Gloo aborts the process on a size mismatch, so the first word is of fixed size: a digest and a length, compared on
their way through the control tree. Only if digests differ do the documents themselves travel, as JSON, padded to
the longest; every rank then finds the same first difference.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from typing import Any

from gradsync.errors import Disagreement, listed
from gradsync.transport.lane import Lane

_ENTRY = struct.Struct("<32sq")
_MAX_NBYTES = 1 << 28

Document = dict[str, Any]


def agree(lane: Lane, document: Document, explain: Callable[[list[Document], list[int]], str]) -> None:
    """Return if all ranks bring the same document; otherwise raise on all, with `explain`'s sentence."""
    text = json.dumps(document, sort_keys=True).encode()
    mine = _ENTRY.pack(hashlib.sha256(text).digest(), len(text))
    if lane.same(mine):
        return
    lengths = [_ENTRY.unpack(row)[1] for row in lane.exchange(mine)]
    if not 0 <= max(lengths) <= _MAX_NBYTES:
        raise Disagreement(f"a rank announced a model description of {max(lengths)} bytes; do all run this gradsync?")
    padded = text.ljust(max(lengths), b" ")
    documents = [json.loads(row) for row in lane.exchange(padded)]
    lane.fail()
    raise Disagreement(explain(documents, list(lane.groups.ranks)))


def share(lane: Lane, document: Document) -> list[Document]:
    """Every rank's document, on every rank."""
    text = json.dumps(document).encode()
    lengths = [int.from_bytes(row, "little") for row in lane.exchange(len(text).to_bytes(8, "little"))]
    return [json.loads(row) for row in lane.exchange(text.ljust(max(lengths), b" "))]


def majority(values: list[Any], ranks: list[int]) -> tuple[str, str, str, str]:
    """The commonest value with its ranks, and the first other one with its ranks.

    >>> majority(["a", "b", "a"], [0, 1, 2])
    ('a', 'ranks 0 and 2', 'b', 'rank 1')
    """
    by_value: dict[str, list[int]] = {}
    for value, rank in zip(values, ranks, strict=True):
        by_value.setdefault(value if isinstance(value, str) else json.dumps(value), []).append(rank)
    usual = max(by_value, key=lambda value: (len(by_value[value]), -by_value[value][0]))
    other = next(value for value in by_value if value != usual)
    return usual, listed(by_value[usual]), other, listed(by_value[other])
