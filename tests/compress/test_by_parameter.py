"""The first rule that matches decides; rules that could never decide are refused."""

from __future__ import annotations

from typing import Any

import pytest

import gradsync as gs
from gradsync.compress.param import Param

GPT = gs.by_parameter(
    [
        gs.rule("*embed*", compress=None),
        gs.rule(dims=1, compress=None),
        gs.rule("head.*", compress=gs.int8()),
        gs.rule(min_numel=10_000, compress=gs.powersgd(4)),
    ],
    default=gs.bf16(),
)


@pytest.mark.parametrize(
    ("name", "shape", "label"),
    [
        ("embed.weight", (50_000, 64), "exact"),
        ("blocks.0.norm.weight", (64,), "exact"),
        ("head.weight", (64, 64), "int8"),
        ("head.bias", (64,), "exact"),
        ("blocks.0.up.weight", (256, 64), "powersgd"),
        ("blocks.0.gate.weight", (10, 64), "bf16"),
        ("EMBED.weight", (10, 64), "bf16"),
        ("scale", (), "bf16"),
    ],
)
def test_the_first_rule_that_matches_decides(name: str, shape: tuple[int, ...], label: str) -> None:
    assert GPT.choose(Param(name, shape)).label == label


def test_without_a_default_the_others_go_as_they_are() -> None:
    assert gs.by_parameter([gs.rule("a", compress=gs.int8())]).choose(Param("b", (64,))).label == "exact"


def test_a_mapping_is_rules_by_name() -> None:
    short = gs.by_parameter({"*.bias": None, "*": gs.int4()})
    assert short == gs.by_parameter([gs.rule("*.bias", compress=None), gs.rule("*", compress=gs.int4())])


def test_rules_may_lead_to_rules() -> None:
    inner = gs.by_parameter([gs.rule(dims=1, compress=None)], default=gs.int8())
    outer = gs.by_parameter({"head.*": gs.fp16()}, default=inner)
    assert [outer.choose(Param(*it)).label for it in (("head.b", (4,)), ("b", (4,)), ("w", (4, 4)))] == [
        "fp16",
        "exact",
        "int8",
    ]


any_, bias = gs.rule(compress=gs.int8()), gs.rule("*.bias", compress=None)


@pytest.mark.parametrize(
    ("rules", "default", "kind", "sentence"),
    [
        ([], None, ValueError, "by_parameter needs at least one rule, got none"),
        ({}, None, ValueError, "by_parameter needs at least one rule, got none"),
        ([any_, bias], None, ValueError, "Rule(pattern='*.bias', compress=None, min_numel=0, dims=None) never matches"),
        ([bias, bias], None, ValueError, "stands before it; swap them or leave it out"),
        ([gs.rule(dims=2, compress=None), gs.rule("w", dims=2, compress=None)], None, ValueError, "never matches"),
        ([any_], gs.bf16(), ValueError, "the default Bf16() is never used"),
        ([gs.int8()], None, TypeError, "a rule is made by gs.rule(pattern, compress=...), got ErrorFeedback"),
        ("*", None, TypeError, "rules must be a list of gs.rule(...) or a dict from patterns to compressors, got '*'"),
        (bias, None, TypeError, "rules must be a list of gs.rule(...)"),
        (None, None, TypeError, "rules must be a list of gs.rule(...)"),
        ({"*": "int8"}, None, TypeError, "rule: compress must be None or one of gs.fp16(), "),
        ({3: None}, None, ValueError, "rule: pattern must be a parameter's name with * and ? in it"),
        ([bias], "bf16", TypeError, "default must be None or one of gs.fp16(), "),
    ],
)
def test_rules_that_decide_nothing_are_refused(rules: Any, default: Any, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind) as caught:
        gs.by_parameter(rules, default)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"pattern": ""}, "rule: pattern must be a parameter's name with * and ? in it, as \"*.bias\", got ''"),
        ({"pattern": "a\nb"}, "rule: pattern must be"),
        ({"pattern": "\ud800"}, "rule: pattern must be"),
        ({"min_numel": -1}, "rule: min_numel must be a whole number from 0"),
        ({"min_numel": 0.5}, "rule: min_numel must be a whole number from 0"),
        ({"dims": -1}, "rule: dims must be a whole number from 0 to 64, got -1"),
        ({"dims": (1, 2)}, "rule: dims must be a whole number from 0 to 64, got (1, 2)"),
        ({"dims": 0, "min_numel": 2}, "dims=0 means a single number, which min_numel=2 excludes"),
    ],
)
def test_a_rule_that_matches_nothing_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        gs.rule(compress=None, **fields)
    assert sentence in str(caught.value)


def test_a_rule_must_say_what_it_does() -> None:
    with pytest.raises(TypeError, match="compress"):
        gs.rule("*.bias")  # type: ignore[call-arg]
