"""A plan in a few words for a table, and as the Python that makes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from gradsync.algorithms.tree import tree
from gradsync.compress.by_parameter import rule
from gradsync.compress.toml import MAKERS
from gradsync.plan import paces
from gradsync.plan.sync_plan import ALGORITHMS, Plan

_NESTEROV = "nesterov"
# The factories that take arguments: what has its default is not said.
_FACTORIES: dict[str, Callable[..., Any]] = {
    **{kind: make for kind, (_, make) in MAKERS.items()},
    **{kind: getattr(paces, kind) for kind in (*paces.KINDS, _NESTEROV)},
    "rule": rule,
    "tree": tree,
}


def in_words(plan: Plan) -> str:
    """Say what the plan does; what is usual is left out, except that nothing is lost.

    >>> from gradsync.compress.integers import int8
    >>> in_words(Plan()), in_words(Plan(compress=int8(), pace=paces.accumulate(4), bucket_bytes=25 << 20))
    ('exact', 'int8 · accumulate(4) · 25 MiB buckets')
    """
    table = plan.canonical()
    words = [_words(table["algorithm"])] if "algorithm" in table else []
    words.append(_words(table["compress"]) if "compress" in table else "exact")
    if plan.pace != paces.every_step():
        words.append(_words(table["pace"]))
    if plan.bucket_bytes is not None:
        words.append(f"{plan.bucket_bytes / 2**20:.3g} MiB buckets")
    if plan.overlap == "none":
        words.append("no overlap")
    return " · ".join(words)


def as_python(plan: Plan) -> str:
    """The expression that makes this plan.

    >>> from gradsync.compress.powersgd import powersgd
    >>> as_python(Plan(compress=powersgd(rank=8), overlap="none"))
    "gs.Plan(compress=gs.powersgd(8), overlap='none')"
    """
    table, usual = plan.canonical(), Plan().canonical()
    fields = ("algorithm", "compress", "pace", "overlap", "bucket_bytes", "combine", "audit_every")
    said = [f"{name}={_source(table[name])}" for name in fields if table.get(name) != usual.get(name)]
    return f"gs.Plan({', '.join(said)})"


def _words(recipe: dict[str, Any]) -> str:
    return _source(recipe).replace("gs.", "").removesuffix("()")


def _source(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_source({'kind': 'rule', **item}) for item in value)}]"
    if not isinstance(value, dict):
        return repr(value)
    if value["kind"] == "exact":
        return "None"
    if value["kind"] not in (*_FACTORIES, *ALGORITHMS):  # from outside: its class, with all fields
        fields = [f"{name}={_source(it)}" for name, it in value.items() if name != "kind"]
        return f"{value['kind']}({', '.join(fields)})"
    return f"gs.{value['kind']}({', '.join(_arguments(value))})"


def _arguments(recipe: dict[str, Any]) -> list[str]:
    """The arguments that do not have their default: the factory's first by its place, the others by name."""
    factory = _FACTORIES.get(recipe["kind"])
    said: list[str] = []
    for place, (name, it) in enumerate(inspect.signature(factory).parameters.items() if factory else ()):
        value = recipe.get(name)  # None is left out of a recipe
        if name == "outer":
            value = {"kind": _NESTEROV, **recipe[name]}
        if not _is_default(recipe, name, value, it.default):
            said.append(f"{name}={_source(value)}" if place else _source(value))
    return said


def _is_default(recipe: dict[str, Any], name: str, value: Any, usual: object) -> bool:
    if name == "outer":
        return bool(value == {"kind": _NESTEROV, "lr": 0.7, "momentum": 0.9})
    if name == "feedback":  # left out: the factory decides by the way of rounding
        return bool(value == (recipe.get("rounding", "nearest") == "nearest"))
    return bool(value == usual) or (usual is None and value == {"kind": "exact"})
