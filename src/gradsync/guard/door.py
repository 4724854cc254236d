"""What ranks must have in common before they synchronize a model, and the sentence if they have not."""

from __future__ import annotations

import json
from typing import Any

from gradsync.guard.agreement import Document, agree, majority
from gradsync.transport.lane import Lane

PROTOCOL = 3


def check_door(lane: Lane, parameters: list[dict[str, Any]], plan: dict[str, Any], refusal: str | None) -> None:
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
