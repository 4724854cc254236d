"""Real ranks: equal to synchronous SGD at s=0, within bounds at any s, and they learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import async_runs
import pytest
import torch

from gradsync.plan.paces import AsyncSGD

Run = Callable[..., list[Any]]


def assert_same(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["momentum", "adamw", "two"])
def test_without_staleness_it_is_synchronous_sgd_bit_by_bit(run: Run, kind: str, ranks: int) -> None:
    [*results] = run(async_runs.train, kind, AsyncSGD(0), 6, True, ranks=ranks)
    [by_hand] = run(async_runs.train_by_hand, kind, ranks, 6, True, ranks=1)
    for result in results:
        assert_same(result["values"], by_hand)
        assert result["stats"]["clock_distance_max"] == 0
        assert result["stats"]["staleness_max"] == 0


@pytest.mark.parametrize("settings", [AsyncSGD(1), AsyncSGD(4, scale="1/staleness"), AsyncSGD(None, compensate=0.04)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_it_learns_within_its_bounds_and_all_end_with_the_same(run: Run, ranks: int, settings: AsyncSGD) -> None:
    results = run(async_runs.train, "sgd", settings, 40, ranks=ranks)
    for result in results:
        assert sum(result["losses"][-5:]) < 0.6 * sum(result["losses"][:5])
        assert_same(result["values"], results[0]["values"])
        assert_within_bounds(result["stats"], settings)
        assert (result["stats"]["clock"], result["stats"]["version"]) == (40, 40 * ranks)


def assert_within_bounds(stats: dict[str, Any], settings: AsyncSGD) -> None:
    if settings.max_staleness is None:
        assert stats["staleness_bound"] is None
        return
    assert stats["clock_distance_max"] <= settings.max_staleness
    assert stats["staleness_max"] <= stats["staleness_bound"]


@pytest.mark.parametrize("s", [0, 1, 3])
def test_a_fast_rank_gets_just_s_ahead_of_a_slow_one(run: Run, s: int) -> None:
    """First rank 0 is slow, then rank 1; each goes on only when the other has got as far as the rule allows."""
    results = run(async_runs.train_with_a_slow_rank, AsyncSGD(s), {0: 2, 1: s + 4}, 2 * s + 6, ranks=2)
    for result in results:
        assert_within_bounds(result["stats"], AsyncSGD(s))
        assert result["stats"]["clock_distance_max"] == s
        assert_same(result["values"], results[0]["values"])


def test_three_ranks_of_different_speed_stay_within_the_bounds(run: Run) -> None:
    for result in run(async_runs.train_with_a_slow_rank, AsyncSGD(2), {0: 1, 2: 6}, 10, ranks=3):
        assert_within_bounds(result["stats"], AsyncSGD(2))


@pytest.mark.parametrize("s", [0, 1])
def test_who_left_holds_nobody_up_and_may_come_back(run: Run, s: int) -> None:
    results = run(async_runs.leave_early, AsyncSGD(s), 1, 2, 8, ranks=3)
    for result in results:
        assert_same(result["values"], results[0]["values"])
        assert result["stats"]["clock"] == 10


def test_saving_and_going_on_is_the_uninterrupted_run(run: Run) -> None:
    for kind in ("momentum", "adamw"):
        results = run(async_runs.go_on_from_a_save, kind, AsyncSGD(0), 6, ranks=2)
        [by_hand] = run(async_runs.train_by_hand, kind, 2, 6, ranks=1)
        for result in results:
            assert_same(result["values"], by_hand)
            assert result["clock"] == 3
            assert result["stats"]["clock"] == 6
