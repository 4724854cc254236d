"""Paces are data: checked when they are made, equal when they say the same, and the same after a file."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gradsync as gs
from gradsync.plan import paces

counts = st.integers(1, 1000)
shares = st.floats(0, 1)
outers = st.builds(gs.nesterov, st.floats(1e-30, 1e30), st.floats(0, 1, exclude_max=True)) | st.none()
EVERY = {
    "every_step": st.builds(gs.every_step),
    "accumulate": st.builds(gs.accumulate, counts, counts),
    "local_sgd": st.builds(gs.local_sgd, counts, st.integers(0, 1000), st.booleans()),
    "diloco": st.builds(
        lambda fragments, stretch, late, outer, mixing: gs.diloco(
            fragments * stretch, outer, fragments, late % (fragments * stretch), mixing
        ),
        counts,
        counts,
        counts,
        outers,
        shares,
    ),
    "delayed": st.builds(gs.delayed, counts),
    "async_sgd": st.builds(
        gs.async_sgd,
        st.none() | st.integers(0, 1000),
        st.none() | st.floats(0, 1e30),
        st.none() | st.just("1/staleness"),
    ),
    "gossip": st.builds(gs.gossip, st.sampled_from(["ring", "exponential"]), counts),
}
every = st.one_of(*EVERY.values())
in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def test_every_pace_is_tried_here_and_can_be_made_by_its_name() -> None:
    assert list(EVERY) == list(paces.KINDS)
    assert all(name in gs.__all__ for name in EVERY)


@settings(deadline=None)
@pytest.mark.parametrize("kind", EVERY)
@given(data=st.data())
def test_a_pace_is_the_same_as_plain_data(kind: str, data: st.DataObject) -> None:
    pace = data.draw(EVERY[kind])
    plain = paces.canonical(pace)
    assert plain.pop("kind") == kind
    assert paces.from_canonical(kind, plain) == pace
    assert paces.from_canonical(kind, json.loads(json.dumps(plain))) == pace


@in_one_folder
@pytest.mark.parametrize("kind", EVERY)
@given(data=st.data())
def test_a_pace_is_the_same_after_a_file(kind: str, data: st.DataObject, tmp_path: Path) -> None:
    plan = gs.Plan(pace=data.draw(EVERY[kind]))
    plan.save(tmp_path / "plan.toml")
    assert gs.Plan.load(tmp_path / "plan.toml") == plan


def test_a_file_shows_the_outer_optimizer_and_leaves_out_what_is_none(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    gs.Plan(pace=gs.diloco(50, gs.nesterov(0.5, 0.25), fragments=2, delay=3)).save(path)
    assert tomllib.loads(path.read_text())["pace"] == {
        "kind": "diloco",
        "k": 50,
        "fragments": 2,
        "delay": 3,
        "mixing": 0.0,
        "outer": {"lr": 0.5, "momentum": 0.25},
    }
    gs.Plan(pace=gs.async_sgd(None)).save(path)
    assert tomllib.loads(path.read_text())["pace"] == {"kind": "async_sgd"}


@settings(deadline=None)
@given(one=every, other=every)
def test_paces_are_equal_exactly_when_they_read_the_same(one: paces.Pace, other: paces.Pace) -> None:
    """As text: that is how ranks compare them."""
    texts = [json.dumps(paces.canonical(pace), sort_keys=True) for pace in (one, other)]
    assert (one == other) == (texts[0] == texts[1])
    assert dataclasses.replace(one) == one  # type: ignore[type-var]
    assert hash(dataclasses.replace(one)) == hash(one)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (gs.nesterov(1, 0), gs.nesterov(1.0, 0.0)),
        (gs.diloco(2, mixing=1), gs.diloco(2, mixing=1.0)),
        (gs.diloco(2, mixing=-0.0), gs.diloco(2, mixing=0.0)),
        (gs.async_sgd(2, compensate=1), gs.async_sgd(2, compensate=1.0)),
    ],
)
def test_a_whole_number_says_the_same_as_a_float(one: Any, other: Any) -> None:
    assert repr(one) == repr(other)
    assert json.dumps(dataclasses.asdict(one)) == json.dumps(dataclasses.asdict(other))


def test_defaults_are_those_of_the_papers() -> None:
    assert gs.diloco(500) == paces.DiLoCo(500, paces.Nesterov(0.7, 0.9), 1, 0, 0.0)
    assert gs.gossip() == paces.Gossip("ring", 1)
    assert gs.delayed() == paces.Delayed(1)
    assert gs.local_sgd(8) == paces.LocalSGD(8, 0, False)


def test_a_pace_cannot_be_changed() -> None:
    for pace in (gs.diloco(4), gs.nesterov(), gs.gossip()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            pace.k = 1  # type: ignore[misc, union-attr]


COUNTS: dict[str, tuple[Callable[[Any], object], int]] = {
    "accumulate: k": (gs.accumulate, 1),
    "accumulate: backwards": (lambda value: gs.accumulate(2, value), 1),
    "local_sgd: k": (gs.local_sgd, 1),
    "local_sgd: warmup": (lambda value: gs.local_sgd(2, value), 0),
    "diloco: k": (gs.diloco, 1),
    "diloco: fragments": (lambda value: gs.diloco(4, fragments=value), 1),
    "diloco: delay": (lambda value: gs.diloco(4, delay=value), 0),
    "delayed: k": (gs.delayed, 1),
    "async_sgd: max_staleness": (gs.async_sgd, 0),
    "gossip: every": (lambda value: gs.gossip(every=value), 1),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_whole_numbers(name: str) -> None:
    make, least = COUNTS[name]
    make(least)
    for value in (least - 1, -3, 1.5, "4", True, [1], float("nan")):
        with pytest.raises(ValueError) as caught:
            make(value)
        assert str(caught.value) == f"{name} must be a whole number of at least {least}, got {value!r}"


NUMBERS: dict[str, tuple[Callable[[Any], object], list[float], list[float], str]] = {
    "lr": (gs.nesterov, [1, 1e-30, 5.0], [0, -1.0], "nesterov: lr must be a number above 0"),
    "momentum": (
        lambda value: gs.nesterov(1.0, value),
        [0, 0.999],
        [1, 1.0, -0.1],
        "nesterov: momentum must be a number from 0 to below 1",
    ),
    "mixing": (
        lambda value: gs.diloco(2, mixing=value),
        [0, 1, 0.5],
        [1.01, -0.1],
        "diloco: mixing must be a number from 0 to 1",
    ),
    "compensate": (
        lambda value: gs.async_sgd(2, value),
        [0, 1e9],
        [-0.1],
        "async_sgd: compensate must be None or a number of at least 0",
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_stay_in_their_range(name: str) -> None:
    make, good, bad, sentence = NUMBERS[name]
    for value in good:
        make(value)
    for value in (*bad, float("nan"), float("inf"), "0.5", True, [0.5], 10**400):
        with pytest.raises(ValueError) as caught:
            make(value)
        assert str(caught.value) == f"{sentence}, got {value!r}"


@pytest.mark.parametrize(
    ("make", "kind", "sentence"),
    [
        (
            lambda: gs.local_sgd(2, optimizer_state=1),  # type: ignore[arg-type]
            TypeError,
            "local_sgd: optimizer_state must be True or False, got 1",
        ),
        (
            lambda: gs.diloco(2, 0.7),  # type: ignore[arg-type]
            TypeError,
            "diloco: outer must be gs.nesterov(lr, momentum), got 0.7",
        ),
        (
            lambda: gs.diloco(5, fragments=2),
            ValueError,
            "diloco: k must be a multiple of fragments, which synchronize k / fragments steps apart, got k=5 and "
            "fragments=2",
        ),
        (
            lambda: gs.diloco(4, delay=4),
            ValueError,
            "diloco: delay must be less than k, since a fragment's exchange ends before its next begins, got delay=4 "
            "and k=4",
        ),
        (
            lambda: gs.async_sgd(2, scale="staleness"),  # type: ignore[arg-type]
            ValueError,
            "async_sgd: scale must be None or \"1/staleness\", got 'staleness'",
        ),
        (
            lambda: gs.gossip("star"),  # type: ignore[arg-type]
            ValueError,
            'gossip: topology must be "ring" or "exponential", got \'star\'',
        ),
        (
            lambda: gs.gossip([]),  # type: ignore[arg-type]
            ValueError,
            'gossip: topology must be "ring" or "exponential", got []',
        ),
    ],
)
def test_a_pace_that_makes_no_sense_is_refused(make: Callable[[], object], kind: type, sentence: str) -> None:
    with pytest.raises(kind) as caught:
        make()
    assert str(caught.value) == sentence


@pytest.mark.parametrize("pace", [gs.local_sgd(2), gs.diloco(2), gs.async_sgd(2), gs.gossip()], ids=repr)
def test_who_keeps_parameters_adds_no_gradients_up(pace: paces.Pace) -> None:
    name = paces.canonical(pace)["kind"]
    with pytest.raises(ValueError) as caught:
        gs.Plan(pace=pace, combine="sum")
    assert str(caught.value) == f'combine="sum" adds gradients up, but {name} keeps parameters: use combine="mean"'


@pytest.mark.parametrize("pace", [gs.every_step(), gs.accumulate(2), gs.delayed()], ids=repr)
def test_who_averages_gradients_may_add_them_up(pace: paces.Pace) -> None:
    assert gs.Plan(pace=pace, combine="sum").pace == pace


@pytest.mark.parametrize("pace", [gs.async_sgd(2), gs.gossip()], ids=repr)
@pytest.mark.parametrize("fields", [{"algorithm": gs.ring()}, {"compress": gs.int8()}], ids=str)
def test_who_sends_from_rank_to_rank_has_no_all_reduce(pace: paces.Pace, fields: dict[str, Any]) -> None:
    name, [(field, value)] = paces.canonical(pace)["kind"], fields.items()
    with pytest.raises(ValueError) as caught:
        gs.Plan(pace=pace, **fields)
    assert str(caught.value) == (
        f"{name} sends from rank to rank and has no all-reduce to choose or to compress, got {field}={value!r}; "
        "leave it out"
    )


@pytest.mark.parametrize("pace", [gs.local_sgd(2), gs.diloco(2), gs.delayed()], ids=repr)
def test_the_others_go_with_any_algorithm_and_compressor(pace: paces.Pace) -> None:
    plan = gs.Plan(pace=pace, algorithm=gs.ring(), compress=gs.error_feedback(gs.topk(0.01)))
    assert plan.canonical()["pace"] == paces.canonical(pace)


@pytest.mark.parametrize(
    ("pace", "hint"),
    [
        (4, " (did you mean gs.accumulate(4)?)"),
        ("gossip", " (did you mean gs.gossip(...)?)"),
        (gs.gossip, " (did you mean gs.gossip(...)?)"),
        (gs.nesterov(), ""),
        (None, ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_pace_is_refused_by_name(pace: Any, hint: str) -> None:
    with pytest.raises(TypeError) as caught:
        gs.Plan(pace=pace)
    assert str(caught.value) == (
        "pace must be one of gs.every_step(...), gs.accumulate(...), gs.local_sgd(...), gs.diloco(...), "
        f"gs.delayed(...), gs.async_sgd(...), gs.gossip(...), got {pace!r}{hint}"
    )


HOSTILE = {
    "no k": ("kind = 'local_sgd'", "[pace] local_sgd needs k"),
    "a foreign argument": ("kind = 'gossip'\nk = 2", "[pace] gossip does not take ['k']; it takes topology, every"),
    "a topology that is none": (
        "kind = 'gossip'\ntopology = 'star'",
        'gossip: topology must be "ring" or "exponential", got \'star\'',
    ),
    "yes for True": (
        "kind = 'local_sgd'\nk = 2\noptimizer_state = 'yes'",
        "local_sgd: optimizer_state must be True or False, got 'yes'",
    ),
    "an outer that is a word": (
        "kind = 'diloco'\nk = 2\nouter = 'nesterov'",
        "diloco: outer must be gs.nesterov(lr, momentum), got 'nesterov'",
    ),
    "an outer with a foreign argument": (
        "kind = 'diloco'\nk = 2\n[pace.outer]\nlr = 0.7\nbeta = 0.9",
        "diloco: outer does not take ['beta']; it takes lr and momentum",
    ),
    "an outer out of range": (
        "kind = 'diloco'\nk = 2\n[pace.outer]\nmomentum = 1",
        "nesterov: momentum must be a number from 0 to below 1, got 1",
    ),
    "an infinity": ("kind = 'diloco'\nk = 2\nmixing = inf", "diloco: mixing must be a number from 0 to 1, got inf"),
    "a pace with a wrong companion": ("kind = 'async_sgd'\n[compress]\nkind = 'int8'", "leave it out"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_file_with_a_wrong_pace_is_refused_by_name(case: str, tmp_path: Path) -> None:
    text, sentence = HOSTILE[case]
    path = tmp_path / "plan.toml"
    path.write_text(f"[pace]\n{text}\n")
    with pytest.raises(ValueError) as caught:
        gs.Plan.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert sentence in str(caught.value)
