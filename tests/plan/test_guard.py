"""A guard is data, checked when it is made."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradsync as gs

seconds = st.floats(min_value=0, max_value=1e7, exclude_min=True) | st.integers(1, 10**6)


@given(timeout=st.none() | seconds, dead_after=st.floats(1, 1e7), warn_after=seconds)
def test_any_times_in_bounds_are_a_guard(timeout: Any, dead_after: float, warn_after: float) -> None:
    guard = gs.Guard(timeout, dead_after, warn_after)
    assert (guard.timeout, guard.dead_after, guard.warn_after) == (timeout, dead_after, warn_after)


@pytest.mark.parametrize("name", ["timeout", "dead_after", "warn_after"])
@pytest.mark.parametrize("value", [0, -1.0, 1e8, True, math.inf, -math.inf, math.nan, "30", [30]])
def test_a_time_that_is_not_positive_and_finite_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        gs.Guard(**{name: value})
    assert str(caught.value) == f"Guard: {name} must be a positive number of seconds, got {value!r}"


def test_only_the_timeout_may_be_left_to_the_group() -> None:
    assert gs.Guard(timeout=None).timeout is None
    for name in ("dead_after", "warn_after"):
        with pytest.raises(ValueError, match=f"Guard: {name} must be"):
            gs.Guard(**{name: None})  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["allow", "skip", "raise"])
def test_a_guard_knows_three_answers_to_nan(policy: Any) -> None:
    assert gs.Guard(nonfinite=policy).nonfinite == policy


@pytest.mark.parametrize("policy", ["ignore", None, True, ["skip"]])
def test_another_answer_to_nan_is_refused(policy: Any) -> None:
    with pytest.raises(ValueError) as caught:
        gs.Guard(nonfinite=policy)
    assert str(caught.value) == f'Guard: nonfinite must be "allow", "skip" or "raise", got {policy!r}'


@pytest.mark.parametrize("policy", ["off", "warn", "repair", "raise"])
def test_a_guard_knows_four_answers_to_drift(policy: Any) -> None:
    assert gs.Guard(drift=policy).drift == policy


@pytest.mark.parametrize("policy", ["ignore", None, True, ["warn"]])
def test_another_answer_to_drift_is_refused(policy: Any) -> None:
    with pytest.raises(ValueError) as caught:
        gs.Guard(drift=policy)
    assert str(caught.value) == f'Guard: drift must be "off", "warn", "repair" or "raise", got {policy!r}'


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "10", None])
def test_a_number_of_skips_that_is_not_positive_and_whole_is_refused(value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        gs.Guard(max_skips=value)
    assert str(caught.value) == f"Guard: max_skips must be a whole number of steps from 1 on, got {value!r}"


def test_a_guard_cannot_be_changed_and_compares_by_value() -> None:
    assert gs.Guard() == gs.Guard()
    assert gs.Guard() != gs.Guard(dead_after=11)
    with pytest.raises(dataclasses.FrozenInstanceError):
        gs.Guard().dead_after = 1.0  # type: ignore[misc]
