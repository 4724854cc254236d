"""Failures and restarts: the figures of published runs, and the limits of the formula."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.planner.goodput import goodput


def test_sixteen_thousand_gpus_fail_every_three_hours_and_save_every_nineteen_minutes() -> None:
    run = goodput(16_384, checkpoint_s=60)
    assert run.mtbf_s / 3600 == pytest.approx(3.09, abs=0.01)
    assert run.interval_s / 60 == pytest.approx(19, abs=0.5)


def test_a_stall_of_ten_minutes_every_eighteen_leaves_44_percent_and_one_of_three_leaves_83() -> None:
    every = 17.9 / 60
    assert goodput(1, every, checkpoint_s=0, restart_s=600).share == pytest.approx(0.44, abs=0.005)
    assert goodput(1, every, checkpoint_s=0, restart_s=180).share == pytest.approx(0.83, abs=0.005)


def test_a_failure_every_eighteen_minutes_asks_for_a_checkpoint_every_six() -> None:
    assert goodput(1, 17.9 / 60, checkpoint_s=60).interval_s / 60 == pytest.approx(6, abs=0.1)


def test_a_hundred_thousand_gpus_fail_every_half_hour() -> None:
    assert goodput(100_000).mtbf_s / 60 == pytest.approx(30, abs=1)


def test_where_restarts_take_longer_than_failures_are_apart_nothing_gets_on() -> None:
    assert goodput(1_000_000).share == 0.0


@given(st.integers(1, 1_000_000), st.floats(1, 1e6), st.floats(0, 1e5), st.floats(0, 1e5))
def test_the_share_is_one_of_the_whole(gpus: int, hours: float, checkpoint_s: float, restart_s: float) -> None:
    run = goodput(gpus, hours, checkpoint_s, restart_s)
    assert 0 <= run.share <= 1
    assert 0 <= run.interval_s <= run.mtbf_s


@given(st.integers(1, 500_000), st.floats(1, 1000))
def test_more_gpus_and_longer_restarts_never_help(gpus: int, restart_s: float) -> None:
    here = goodput(gpus, restart_s=restart_s).share
    assert goodput(2 * gpus, restart_s=restart_s).share <= here
    assert goodput(gpus, restart_s=2 * restart_s).share <= here


def test_impossible_numbers_are_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="gpus must be a whole number of at least 1, got 0"):
        goodput(0)
    with pytest.raises(ValueError, match="mtbf_gpu_hours must be a positive number of hours, got 0"):
        goodput(8, mtbf_gpu_hours=0)
    with pytest.raises(ValueError, match="restart_s must be a number of seconds, 0 or more, got -1"):
        goodput(8, restart_s=-1)
