"""A plan is data: checked when it is made, equal when it says the same, and the same after a file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gradsync as gs

paces = st.one_of(
    st.builds(gs.every_step),
    st.builds(gs.accumulate, st.integers(1, 10_000), st.integers(1, 8)),
)
compressors = st.sampled_from(
    [
        gs.bf16(),
        gs.int8(),
        gs.warmup(gs.across_hosts(gs.topk(0.01)), 100),
        gs.by_parameter(
            [gs.rule("*.bias", compress=None), gs.rule(dims=1, compress=gs.fp16())], default=gs.powersgd(4)
        ),
    ]
)
compressions = st.fixed_dictionaries({"compress": st.none()}) | st.fixed_dictionaries(
    {"compress": compressors, "audit_every": st.none() | st.integers(1, 10_000)}
)
plans = st.builds(
    lambda compression, **fields: gs.Plan(**compression, **fields),
    compressions,
    algorithm=st.none()
    | st.sampled_from([gs.native(), gs.ring(), gs.halving_doubling(), gs.hierarchical(), gs.shared_memory()])
    | st.builds(gs.tree, st.integers(1, 64)),
    pace=paces,
    overlap=st.sampled_from(["none", "backward"]),
    bucket_bytes=st.none() | st.integers(1024, 1 << 62),
    combine=st.sampled_from(["mean", "sum"]),
)
in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@in_one_folder
@given(plan=plans)
def test_a_plan_is_the_same_after_a_file(plan: gs.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.toml")
    assert gs.Plan.load(tmp_path / "plan.toml") == plan
    plan.save(str(tmp_path / "plan.toml"))
    assert gs.Plan.load(str(tmp_path / "plan.toml")) == plan


@given(one=plans, other=plans)
def test_plans_are_equal_exactly_when_their_canonical_forms_are(one: gs.Plan, other: gs.Plan) -> None:
    assert (one == other) == (one.canonical() == other.canonical())
    assert dataclasses.replace(one).canonical() == one.canonical()
    assert hash(dataclasses.replace(one)) == hash(one)


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        gs.Plan().combine = "sum"  # type: ignore[misc]


def test_the_default_plan_is_what_ddp_does() -> None:
    assert gs.Plan() == gs.Plan(None, None, gs.every_step(), "backward", None, "mean", None)


@pytest.mark.parametrize(
    ("fields", "kind", "sentence"),
    [
        ({"bucket_bytes": 12}, ValueError, "bucket_bytes must be at least 1024, got 12 (bytes, not megabytes)"),
        ({"bucket_bytes": -1}, ValueError, "bucket_bytes must be at least 1024, got -1 (bytes, not megabytes)"),
        ({"bucket_bytes": 2e6}, TypeError, "bucket_bytes must be a whole number or None, got 2000000.0"),
        ({"bucket_bytes": True}, TypeError, "bucket_bytes must be a whole number or None, got True"),
        ({"overlap": "always"}, ValueError, 'overlap must be "none" or "backward", got \'always\''),
        ({"overlap": []}, ValueError, 'overlap must be "none" or "backward", got []'),
        ({"overlap": "forward"}, ValueError, "(overlap with the next forward is not built yet)"),
        ({"combine": "median"}, ValueError, 'combine must be "mean" or "sum", got \'median\''),
        ({"pace": 4}, TypeError, "pace must be one of gs.every_step(...), gs.accumulate(...), "),
        ({"pace": gs.accumulate}, TypeError, "gs.gossip(...), got <function accumulate"),
        ({"algorithm": "ring"}, TypeError, "algorithm must be None or one of gs.native(), gs.ring(), "),
        ({"compress": "int8"}, TypeError, "got 'int8' (did you mean gs.int8()?)"),
        ({"compress": gs.fp16}, TypeError, "compress must be None or one of gs.fp16(), gs.bf16(), gs.int8(), "),
        ({"compress": []}, TypeError, "gs.topk(density), gs.randomk(density), gs.powersgd(rank), "),
        (
            {"compress": gs.int8(), "audit_every": 0},
            ValueError,
            "audit_every must be None or a whole number of at least",
        ),
        ({"compress": gs.int8(), "audit_every": 1.0}, ValueError, "got 1.0 (100: once in a hundred synchronizations)"),
        ({"compress": gs.int8(), "audit_every": True}, ValueError, "whole number of at least 1, got True"),
        ({"audit_every": 100}, ValueError, "leave it out, or say what compresses: compress=gs.int8()"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(fields: dict[str, Any], kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind) as caught:
        gs.Plan(**fields)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("value", [0, -3, 1.5, "4", None, True])
def test_accumulate_takes_whole_numbers_from_one(value: Any) -> None:
    with pytest.raises(ValueError, match="accumulate: k must be a whole number of at least 1"):
        gs.accumulate(value)
    with pytest.raises(ValueError, match="accumulate: backwards must be a whole number of at least 1"):
        gs.accumulate(2, value)


HOSTILE = {
    "unknown field": ("bucket_byte = 4096", "unknown plan field 'bucket_byte'"),
    "unknown table": ("[compression]\nkind = 'fp16'", "unknown plan field 'compression'"),
    "unknown compressor": ("[compress]\nkind = 'zip'", "[compress] needs a kind, one of fp16, bf16, "),
    "a compressor that is a word": ("compress = 'int8'", "[compress] needs a kind"),
    "several compressors": ("[[compress]]\nkind = 'int8'", "[compress] needs a kind"),
    "a foreign argument inside": (
        "[compress]\nkind = 'warmup'\nsteps = 3\n[compress.inner]\nkind = 'sign'\nbits = 2",
        "[compress.inner] sign does not take ['bits']; it takes block, feedback",
    ),
    "an audit of nothing": ("audit_every = 10", "audit_every=10 measures what compression loses, but compress is None"),
    "an audit in words": ("audit_every = 'often'\n[compress]\nkind = 'int8'", "audit_every must be None or a whole"),
    "unknown pace": ("[pace]\nkind = 'sometimes'", "[pace] needs a kind, one of every_step, accumulate"),
    "unknown algorithm": ("[algorithm]\nkind = 'carrier_pigeon'", "[algorithm] needs a kind, one of native"),
    "no kind": ("[pace]\nk = 4", "[pace] needs a kind"),
    "a kind that is a list": ("[pace]\nkind = ['accumulate']", "[pace] needs a kind"),
    "a kind that is a table": ("[pace.kind]\na = 1", "[pace] needs a kind"),
    "a pace that is a word": ("pace = 'accumulate'", "[pace] needs a kind"),
    "several paces": ("[[pace]]\nkind = 'accumulate'", "[pace] needs a kind"),
    "no k": ("[pace]\nkind = 'accumulate'", "[pace] accumulate needs k"),
    "foreign argument": ("[pace]\nkind = 'every_step'\nk = 2", "every_step does not take ['k']; it takes nothing"),
    "k of zero": ("[pace]\nkind = 'accumulate'\nk = 0", "k must be a whole number of at least 1, got 0"),
    "k a float": ("[pace]\nkind = 'accumulate'\nk = 2.5", "k must be a whole number of at least 1, got 2.5"),
    "k a table": ("[pace]\nkind = 'accumulate'\nk = {a = 1}", "k must be a whole number"),
    "bytes in words": ("bucket_bytes = 'many'", "bucket_bytes must be a whole number or None, got 'many'"),
    "bytes a date": ("bucket_bytes = 1979-05-27", "bucket_bytes must be a whole number or None"),
    "too few bytes": ("bucket_bytes = 25", "bucket_bytes must be at least 1024, got 25"),
    "overlap a number": ("overlap = 1", 'overlap must be "none" or "backward", got 1'),
    "combine a list": ("combine = ['mean']", 'combine must be "mean" or "sum"'),
    "not toml": ("import torch", "is not a TOML file"),
    "nested deeply": ("a = " + "[" * 100_000, "is not a TOML file"),
    "a number of 5000 digits": ("bucket_bytes = " + "9" * 5000, "is not a TOML file"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_file_that_is_no_plan_is_refused_by_name(case: str, tmp_path: Path) -> None:
    text, sentence = HOSTILE[case]
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        gs.Plan.load(path)
    assert str(path) in str(caught.value)
    assert sentence in str(caught.value)


@in_one_folder
@given(content=st.binary(max_size=200))
def test_bytes_that_are_no_plan_are_a_value_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_bytes(b"\xff\x00" + content)
    with pytest.raises(ValueError, match="is not a TOML file"):
        gs.Plan.load(path)


def test_a_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"\.toml cannot be read \(No such file or directory\); pass "):
        gs.Plan.load(tmp_path / "plan.toml")


def test_an_empty_file_is_the_default_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("")
    assert gs.Plan.load(path) == gs.Plan()
