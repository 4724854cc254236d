"""A recipe is the same after plain data, after JSON and after a TOML file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from samples import COMPRESSORS, compressors

import gradsync as gs
from gradsync.compress.param import Param
from gradsync.compress.recipe import EXACT, Choice, Compressor
from gradsync.compress.toml import MAKERS, canonical, from_canonical

in_one_folder = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_every_recipe_is_the_same_after_plain_data(compressor: Compressor) -> None:
    assert from_canonical(json.loads(json.dumps(canonical(compressor)))) == compressor


@in_one_folder
@given(compressor=compressors)
def test_any_composition_is_the_same_after_a_file(compressor: Compressor, tmp_path: Path) -> None:
    plan = gs.Plan(compress=compressor, audit_every=10)
    plan.save(tmp_path / "plan.toml")
    assert gs.Plan.load(tmp_path / "plan.toml") == plan


@given(one=compressors, other=compressors)
def test_recipes_are_equal_exactly_when_their_data_is(one: Compressor, other: Compressor) -> None:
    assert (one == other) == (canonical(one) == canonical(other))


@pytest.mark.parametrize("kind", sorted(set(MAKERS) - {"error_feedback", "warmup", "by_parameter", "across_hosts"}))
def test_what_is_left_out_is_as_the_factory_has_it(kind: str) -> None:
    needed = {"density": 0.1} if kind in ("topk", "randomk") else {}
    assert from_canonical({"kind": kind, **needed}) == MAKERS[kind][1](**needed)


def test_exact_stands_for_none() -> None:
    assert canonical(None) == {"kind": "exact"}
    assert from_canonical({"kind": "exact"}) is None


REFUSED: dict[str, tuple[Any, str]] = {
    "a word": ("int8", "[compress] needs a kind, one of fp16, bf16, "),
    "nothing": ({}, 'write a table: [compress] and below it kind = "int8"'),
    "a kind that is a list": ({"kind": ["int8"]}, "[compress] needs a kind"),
    "an unknown kind": ({"kind": "zip"}, "got {'kind': 'zip'}"),
    "a foreign argument": ({"kind": "fp16", "block": 64}, "[compress] fp16 does not take ['block']; it takes nothing"),
    "an argument of exact": ({"kind": "exact", "block": 64}, "[compress] exact does not take ['block']"),
    "a missing argument": ({"kind": "topk"}, "[compress] topk needs density"),
    "a bad argument": ({"kind": "topk", "density": 7}, "[compress] topk: density must be above 0 and at most 1, got 7"),
    "a bad argument inside": (
        {"kind": "warmup", "steps": 3, "inner": {"kind": "int8", "block": 3}},
        "[compress.inner] int8: block must be a power of two",
    ),
    "nothing inside": ({"kind": "warmup", "steps": 3}, "[compress] warmup needs inner"),
    "exact inside": (
        {"kind": "warmup", "steps": 3, "inner": {"kind": "exact"}},
        "[compress] warmup wraps a compressor, got None",
    ),
    "a word inside": ({"kind": "across_hosts", "inner": "int8"}, "[compress.inner] needs a kind"),
    "rules that are a table": ({"kind": "by_parameter", "rules": {"*": "int8"}}, "rules must be a list of tables"),
    "rules that are words": ({"kind": "by_parameter", "rules": ["*"]}, "[[compress.rules]] needs a compress table"),
    "a rule without": (
        {"kind": "by_parameter", "rules": [{"pattern": "*"}]},
        "[[compress.rules]] needs a compress table",
    ),
    "a rule with more": (
        {"kind": "by_parameter", "rules": [{"compress": {"kind": "fp16"}, "size": 3}]},
        "[compress.rules] rule does not take ['size']",
    ),
    "a rule of a bad kind": (
        {"kind": "by_parameter", "rules": [{"compress": {"kind": "fp61"}}]},
        "[compress.rules.compress] needs a kind",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_data_that_is_no_recipe_is_refused_by_name(case: str) -> None:
    table, sentence = REFUSED[case]
    with pytest.raises(ValueError) as caught:
        from_canonical(table)
    assert sentence in str(caught.value)


def test_recipes_nested_without_end_are_refused(tmp_path: Path) -> None:
    path, inside = tmp_path / "plan.toml", "compress"
    lines = []
    for _ in range(100):
        lines.append(f"[{inside}]\nkind = 'across_hosts'\n")
        inside += ".inner"
    path.write_text("".join(lines))
    with pytest.raises(ValueError, match="recipes stand in each other at most 64 deep"):
        gs.Plan.load(path)


class Homemade:
    def choose(self, param: Param) -> Choice:
        return EXACT


def test_what_cannot_be_compared_between_ranks_is_refused() -> None:
    with pytest.raises(TypeError, match=r"is none of fp16, .* cannot be compared between ranks"):
        gs.Plan(compress=gs.warmup(Homemade(), 3))
