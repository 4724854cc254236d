"""A comparison of what ranks must have in common to synchronize a model, and the sentence if they have not.

The order of the buckets: ranks that launch different ones find out before a sum is used, and all say the same.

A rank compares each bucket with what was laid out before it launches it, and launches no more if it is another: so
nothing of unequal size ever meets in a transport, which might not survive it. What it would have launched is in its
header, and every rank reads the headers before it waits for a sum.

    layout        forms compared, once             nobody allocates or sends what others do not
    launch        each bucket against the layout   a rank that goes astray stops
    header        hash of all launched             every rank raises
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Any

from gradsync.agreement.documents import Document, agree, majority, share
from gradsync.agreement.header import ORDER, Headers
from gradsync.agreement.outcome import HealthLog
from gradsync.errors import Disagreement
from gradsync.transport.lane import Lane

PROTOCOL = 3


def check_attach(lane: Lane, parameters: list[dict[str, Any]], plan: dict[str, Any], refusal: str | None) -> None:
    """Compare parameters, plan, protocol and whether a rank refused; raise the same error on all."""
    document = {"protocol": PROTOCOL, "refusal": refusal, "plan": plan, "parameters": parameters}
    agree(lane, document, explain)


def explain(documents: list[Document], ranks: list[int]) -> str:
    """The first difference, as one sentence.

    >>> row = {"name": "w", "dtype": "float32"}
    >>> one, two = ({"protocol": 1, "refusal": None, "plan": {}, "parameters": [row | {"dtype": d}]}
    ...             for d in ("float32", "float64"))
    >>> print(explain([one, two], [0, 1]))
    parameter 0 ("w") has dtype float32 on rank 0 but float64 on rank 1; build the same model on every rank
    """
    if len({d["protocol"] for d in documents}) > 1:
        usual, those, other, these = majority([d["protocol"] for d in documents], ranks)
        return (
            f"the gradsync protocol is {usual} on {those} but {other} on {these}; "
            "install the same gradsync on every host"
        )
    for document, rank in zip(documents, ranks, strict=True):
        if document["refusal"] is not None:
            return f"rank {rank} refused to attach: {document['refusal']}"
    plans = [d["plan"] for d in documents]
    if any(plan != plans[0] for plan in plans):
        return _explain_plans(plans, ranks)
    tables = [d["parameters"] for d in documents]
    for kind in ("parameter", "buffer"):
        rows = [[row for row in table if row.get("kind", "parameter") == kind] for table in tables]
        if any(each != rows[0] for each in rows):
            return _explain_rows(kind, rows, ranks)
    raise AssertionError("the documents do not differ")


def _explain_plans(plans: list[dict[str, Any]], ranks: list[int]) -> str:
    for key in sorted({key for plan in plans for key in plan}):
        values = [plan.get(key) for plan in plans]
        if any(value != values[0] for value in values):
            usual, those, other, these = majority(values, ranks)
            return (
                f"the plans differ: {key} is {usual} on {those} but {other} on {these}; "
                "pass the same plan on every rank"
            )
    raise AssertionError("the plans do not differ")


def _explain_rows(kind: str, tables: list[list[dict[str, Any]]], ranks: list[int]) -> str:
    advice = "build the same model on every rank"
    for index in range(min(len(table) for table in tables)):
        rows = [table[index] for table in tables]
        for key in rows[0]:
            values = [row[key] for row in rows]
            if all(value == values[0] for value in values):
                continue
            usual, those, other, these = majority(values, ranks)
            if key == "name":
                difference = f"{json.dumps(usual)} on {those} but {json.dumps(other)} on {these}"
                return f"{kind} {index} is {difference}; {advice}, in the same order"
            if key == "optimizer":
                advice = "make the same optimizers with the same groups on every rank"
            return f'{kind} {index} ("{rows[0]["name"]}") has {key} {usual} on {those} but {other} on {these}; {advice}'
    counts = [len(table) for table in tables]
    usual, those, other, these = majority(counts, ranks)
    longest = max(tables, key=len)
    first = longest[min(counts)]["name"]
    return (
        f"the model has {usual} {kind}s on {those} but {other} on {these} "
        f'(the first that is not everywhere is "{first}"); {advice}'
    )


def check_order(lane: Lane, headers: Headers, launched: Sequence[str], health_log: HealthLog | None = None) -> None:
    """Raise the same sentence everywhere if ranks launched different buckets; `launched` describes this rank's."""
    if not headers.differ_in(ORDER):
        return
    lane.fail()
    lists: list[list[str]] = [document["launched"] for document in share(lane, {"launched": list(launched)})]
    text = first_difference(lists, list(lane.groups.ranks), headers.heads[0].step)
    if health_log is not None:
        health_log.tell(lane.step, "order", text)
    raise Disagreement(text)


def first_difference(lists: list[list[str]], ranks: list[int], step: int) -> str:
    """The sentence for ranks that launched these lists of buckets.

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
    mine, what = zlib.crc32(repr(list(forms)).encode()).to_bytes(4, "little"), "the layout of the buckets"
    if not lane.same(mine, what):
        rows = lane.exchange(mine, what)
        lane.fail()
        usual, those, _, these = majority([row.hex() for row in rows], list(lane.groups.ranks))
        raise Disagreement(
            f"the ranks packed their gradients differently: {these} not as {those} (layout {usual}); detach and attach "
            "again on every rank, or resume all from the same checkpoint"
        )
