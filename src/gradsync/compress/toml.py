"""Recipes as plain data and back: what ranks compare, and what stands in a TOML file.

    {"kind": "warmup", "steps": 100, "inner": {"kind": "int8", "block": 256, …, "feedback": True}}

Fields are the arguments of the factory of that name, so that a file can leave out what has a default. A recipe from
outside of this package, a frozen dataclass, goes by the name of its class: ranks compare it, and no file can hold it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from gradsync import tables
from gradsync.compress.by_parameter import ByParameter, Rule, by_parameter, rule
from gradsync.compress.cast import Bf16, Fp16, bf16, fp16
from gradsync.compress.integers import Int4, Int8, int4, int8
from gradsync.compress.powersgd import PowerSGD, powersgd
from gradsync.compress.randomk import RandomK, randomk
from gradsync.compress.recipe import Compressor
from gradsync.compress.sign import Sign, sign
from gradsync.compress.topk import TopK, topk
from gradsync.compress.wrappers import AcrossHosts, ErrorFeedback, Warmup, across_hosts, error_feedback, warmup

_T = TypeVar("_T")
_Makers = dict[str, tuple[type, Callable[..., Compressor]]]
_PLAIN: _Makers = {
    "fp16": (Fp16, fp16),
    "bf16": (Bf16, bf16),
    "error_feedback": (ErrorFeedback, error_feedback),
    "warmup": (Warmup, warmup),
    "by_parameter": (ByParameter, by_parameter),
    "across_hosts": (AcrossHosts, across_hosts),
}
_WITH_FEEDBACK: _Makers = {  # their factories take it as an argument
    "int8": (Int8, int8),
    "int4": (Int4, int4),
    "sign": (Sign, sign),
    "topk": (TopK, topk),
    "randomk": (RandomK, randomk),
    "powersgd": (PowerSGD, powersgd),
}
MAKERS: _Makers = {**_PLAIN, **_WITH_FEEDBACK}
EXACTLY = "exact"  # for None, which has no place in TOML
_MAX_DEPTH = 64  # a file may hold anything: ours to end before the interpreter does


def canonical(compressor: object) -> dict[str, Any]:
    """Plain data that says the same.

    >>> canonical(topk(0.01))
    {'kind': 'topk', 'density': 0.01, 'block': 1024, 'feedback': True}
    """
    if compressor is None:
        return {"kind": EXACTLY}
    codec = compressor.inner if isinstance(compressor, ErrorFeedback) else compressor
    kind = _kind_of(codec, _WITH_FEEDBACK)
    if kind is not None:
        return {"kind": kind, **_fields_of(codec), "feedback": codec is not compressor}
    kind = _kind_of(compressor, _PLAIN) or (type(compressor).__name__ if tables.is_comparable(compressor) else None)
    if kind is None:
        raise TypeError(
            f"compress: {compressor!r} is none of {', '.join(MAKERS)}, and others cannot be compared between ranks; "
            "if it is your own, make it a @dataclass(frozen=True)"
        )
    return {"kind": kind, **_fields_of(compressor)}


def from_canonical(table: object, where: str = "compress") -> Compressor | None:
    """The recipe that plain data stands for; `where` it stands is told in errors.

    >>> from_canonical({"kind": "warmup", "steps": 100, "inner": {"kind": "bf16"}})
    Warmup(inner=Bf16(), steps=100)
    """
    if where.count(".") > _MAX_DEPTH:
        raise ValueError(f"compress: recipes stand in each other at most {_MAX_DEPTH} deep, got [{where}]")
    kinds = [*MAKERS, EXACTLY]
    if not isinstance(table, dict) or table.get("kind") not in kinds:
        raise ValueError(
            f"[{where}] needs a kind, one of {', '.join(kinds)}, got {table!r}; "
            f'write a table: [{where}] and below it kind = "int8"'
        )
    kind, arguments = table["kind"], {name: value for name, value in table.items() if name != "kind"}
    for name in ("inner", "default"):
        if name in arguments:
            arguments[name] = from_canonical(arguments[name], f"{where}.{name}")
    if "rules" in arguments:
        arguments["rules"] = _rules_from(arguments["rules"], f"{where}.rules")
    if kind == EXACTLY:
        return _call(lambda: None, kind, arguments, where)
    return _call(MAKERS[kind][1], kind, arguments, where)


def _rules_from(rules: object, where: str) -> list[Rule]:
    if not isinstance(rules, list):
        raise ValueError(f"rules must be a list of tables, [[{where}]] for each, got {rules!r}")
    return [_rule_from(table, where) for table in rules]


def _rule_from(table: object, where: str) -> Rule:
    if not isinstance(table, dict) or "compress" not in table:
        raise ValueError(f'[[{where}]] needs a compress table with a kind ("{EXACTLY}" for none), got {table!r}')
    arguments = {**table, "compress": from_canonical(table["compress"], f"{where}.compress")}
    return _call(rule, "rule", arguments, where)


def _call(make: Callable[..., _T], kind: str, arguments: dict[str, Any], where: str) -> _T:
    tables.check_arguments(f"[{where}]", kind, make, arguments)
    try:
        return make(**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"[{where}] {error}") from None


def _kind_of(value: object, makers: _Makers) -> str | None:
    return next((kind for kind, (cls, _) in makers.items() if isinstance(value, cls)), None)


def _fields_of(recipe: Any) -> dict[str, Any]:
    """A dataclass as plain data; a field that is None is left out, except where None means exact."""
    table: dict[str, Any] = {}
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        if field.name in ("inner", "compress", "default"):
            table[field.name] = canonical(value)
        elif field.name == "rules":
            table[field.name] = [_fields_of(item) for item in value]
        elif value is not None:
            table[field.name] = value
    return table
