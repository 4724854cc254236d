"""The arithmetic of weights, without ranks: what each brings and what comes back is the weighted mean."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsync.agreement.header import Flag, Head, Headers, pack_header
from gradsync.engine.weighting import Weighting

weights = st.floats(min_value=2.0**-20, max_value=2.0**20)
members = st.lists(st.tuples(weights, st.integers(1, 4), st.floats(-100, 100)), min_size=1, max_size=6)


def _headers(announced: list[tuple[float, int]], batches: list[int]) -> Headers:
    rows = [
        pack_header(Head(0, 0, weight, 1, -1, j, flags, bytes(8)), bytearray(1))
        for (weight, flags), j in zip(announced, batches, strict=True)
    ]
    return Headers(torch.stack(rows))


@given(members, members)
def test_the_sum_times_the_factor_is_the_weighted_mean(
    first: list[tuple[float, int, float]], second: list[tuple[float, int, float]]
) -> None:
    """Over two steps, so that the second has a unit that the first chose."""
    size = min(len(first), len(second))
    ranks = [Weighting(size, 4, "mean") for _ in range(size)]
    for step in (first[:size], second[:size]):
        for rank, (weight, _, _) in zip(ranks, step, strict=True):
            rank.weight = weight
        sums = [j * gradient for _, j, gradient in step]  # over its micro-batches
        brought = sum(rank.scale() * total for rank, total in zip(ranks, sums, strict=True))
        headers = _headers([rank.announced(Flag.NONE) for rank in ranks], [j for _, j, _ in step])
        mean = sum(w * j * g for w, j, g in step) / sum(w * j for w, j, _ in step)
        for rank in ranks:
            assert brought * rank.factor(headers) == pytest.approx(mean, rel=1e-9, abs=1e-9)
            rank.follow(headers)
        assert len({rank.unit for rank in ranks}) == 1
        assert math.log2(ranks[0].unit) == int(math.log2(ranks[0].unit)), "a power of two, so nothing is rounded"


def test_equal_weights_multiply_by_exactly_one() -> None:
    for size in range(1, 65):
        rank = Weighting(size, 1, "mean")
        assert rank.scale() == 1.0 / size
        assert rank.factor(_headers([rank.announced(Flag.NONE)] * size, [1] * size)) == 1.0


def test_shadows_and_aborted_ranks_weigh_nothing() -> None:
    rank = Weighting(2, 1, "mean")
    rank.weight = 7.0
    assert rank.announced(Flag.SHADOW) == (0.0, Flag.SHADOW | Flag.WEIGHTED)
    assert rank.announced(Flag.ABORTED)[0] == 0.0


def test_nobody_weighs_anything_and_nothing_is_divided_by_zero() -> None:
    rank = Weighting(2, 1, "mean")
    rank.weight = 0.0
    headers = _headers([rank.announced(Flag.NONE)] * 2, [1, 1])
    assert rank.factor(headers) == 1.0
    rank.follow(headers)
    assert rank.unit == 1.0
