"""Waiting for the slowest: the expected largest of n normal values."""

from __future__ import annotations

import pytest
import torch

from gradsync.planner.stragglers import expected_max, straggler_s


@pytest.mark.parametrize(("n", "known"), [(1, 0.0), (2, 0.5642), (8, 1.4236), (64, 2.3437)])
def test_the_expected_largest_is_the_known_one(n: int, known: float) -> None:
    assert expected_max(n) == pytest.approx(known, rel=0.01, abs=1e-9)


@pytest.mark.parametrize("n", [3, 16, 1000])
def test_the_expected_largest_is_what_a_simulation_shows(n: int) -> None:
    draws = torch.randn(4000, n, generator=torch.Generator().manual_seed(n))
    assert expected_max(n) == pytest.approx(draws.amax(dim=1).mean().item(), abs=0.05)


def test_more_ranks_wait_longer_up_to_a_million() -> None:
    largest = [expected_max(n) for n in (1, 2, 10, 100, 10_000, 100_000, 1_000_000)]
    assert largest == sorted(largest)
    assert 4.8 < largest[-1] < 4.9


def test_one_rank_waits_for_nobody() -> None:
    assert straggler_s(1.0, 0.1, 1) == pytest.approx(0.0, abs=1e-12)


def test_local_steps_average_out() -> None:
    """Four steps between two meetings: their sum varies twice as much as one, so each waits half."""
    assert straggler_s(0.2, 0.05, 8, steps=4) == pytest.approx(straggler_s(0.2, 0.05, 8) / 2)
    sums = (1 + 0.05 * torch.randn(4000, 8, 4, generator=torch.Generator().manual_seed(0))).sum(dim=2)
    waited = (sums.amax(dim=1) - 4).mean().item() / 4
    assert straggler_s(1.0, 0.05, 8, steps=4) == pytest.approx(waited, rel=0.05)


def test_impossible_numbers_are_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="n must be a number of ranks of at least 1, got 0"):
        expected_max(0)
    with pytest.raises(ValueError, match="steps must be a whole number of at least 1, got 0"):
        straggler_s(1.0, 0.1, 8, steps=0)
    with pytest.raises(ValueError, match=r"jitter must be a relative deviation, 0 or more, got -0\.1"):
        straggler_s(1.0, -0.1, 8)
