"""The order of the buckets: ranks that launch different ones find out before a sum is used, and all say the same.

A rank compares each bucket with what was laid out before it launches it, and launches no more if it is another: so
nothing of unequal size ever meets in a transport, which might not survive it. What it would have launched is in its
header, and every rank reads the headers before it waits for a sum.

    layout        forms compared, once             nobody allocates or sends what others do not
    launch        each bucket against the layout   a rank that goes astray stops
    header        hash of all launched             every rank raises
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from gradsync.errors import Disagreement
from gradsync.guard.agreement import majority, share
from gradsync.guard.header import Headers
from gradsync.transport.lane import Lane


def check_order(lane: Lane, headers: Headers, launched: Sequence[str]) -> None:
    """Raise the same sentence everywhere if ranks launched different buckets; `launched` describes this rank's."""
    orders = {head.order for head in headers.heads}
    if len(orders) == 1:
        return
    lane.fail()
    lists: list[list[str]] = [document["launched"] for document in share(lane, {"launched": list(launched)})]
    raise Disagreement(first_difference(lists, list(lane.groups.ranks), headers.heads[0].step))


def first_difference(lists: list[list[str]], ranks: list[int], step: int) -> str:
    """The sentence.

    >>> print(first_difference([["bucket 0 (a)", "bucket 1 (b)"], ["bucket 1 (b)", "bucket 0 (a)"]], [0, 1], 4))
    the ranks launched different buckets in synchronization 4: number 0 was bucket 0 (a) on rank 0 but bucket 1 (b) on \
rank 1; no rank has used anything of it. Restart all ranks from the last checkpoint
    """
    what = "the first that differs cannot be told"
    for number in range(max(map(len, lists))):
        values = [each[number] if number < len(each) else "nothing" for each in lists]
        if len(set(values)) > 1:
            usual, those, other, these = majority(values, ranks)
            what = f"number {number} was {usual} on {those} but {other} on {these}"
            break
    return (
        f"the ranks launched different buckets in synchronization {step}: {what}; no rank has used anything of it. "
        "Restart all ranks from the last checkpoint"
    )


def check_forms(lane: Lane, forms: Sequence[object]) -> None:
    """Raise everywhere if ranks are about to lay out buckets of different sizes; every rank calls this at once."""
    if lane.groups.size == 1:
        return
    rows = lane.exchange(zlib.crc32(repr(list(forms)).encode()).to_bytes(4, "little"), "the layout of the buckets")
    if any(row != rows[0] for row in rows):
        lane.fail()
        usual, those, _, these = majority([row.hex() for row in rows], list(lane.groups.ranks))
        raise Disagreement(
            f"the ranks packed their gradients differently: {these} not as {those} (layout {usual}); detach and attach "
            "again on every rank, or resume all from the same checkpoint"
        )
