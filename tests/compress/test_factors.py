"""PowerSGD: which gradients are factored, and where the factors begin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradsync as gs
from gradsync.compress.param import Param
from gradsync.compress.powersgd import PowerSGD, matrix, start_q
from gradsync.compress.recipe import EXACT


@pytest.mark.parametrize(
    ("shape", "dtype", "label"),
    [
        ((64, 64), torch.float32, "powersgd"),
        ((64, 3, 7, 7), torch.float32, "powersgd"),
        ((64,), torch.float32, "exact"),
        ((), torch.float32, "exact"),
        ((0, 64), torch.float32, "exact"),
        ((64, 0), torch.float32, "exact"),
        ((4, 4096), torch.float32, "exact"),
        ((16, 16), torch.float32, "powersgd"),
        ((15, 16), torch.float32, "exact"),
        ((16, 16), torch.bfloat16, "exact"),
        ((32, 32), torch.bfloat16, "powersgd"),
    ],
)
def test_what_would_not_shrink_enough_goes_as_it_is(shape: tuple[int, ...], dtype: torch.dtype, label: str) -> None:
    assert gs.powersgd(rank=4, min_ratio=2.0).choose(Param("weight", shape, dtype)).label == label


@given(
    shape=st.lists(st.integers(0, 60), max_size=4).map(tuple),
    rank=st.integers(1, 8),
    ratio=st.floats(1, 20),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16]),
)
def test_what_is_factored_shrinks_as_asked(shape: tuple[int, ...], rank: int, ratio: float, dtype: torch.dtype) -> None:
    codec, param = PowerSGD(rank, ratio), Param("weight", shape, dtype)
    choice = codec.choose(param)
    if choice != EXACT:
        assert choice.nbytes(param) * ratio <= param.nbytes
        assert rank < min(matrix(shape)), "factors thinner than the matrix"


def test_factors_begin_the_same_everywhere_and_differ_by_name_and_seed() -> None:
    weight = Param("weight", (32, 8, 2))
    q = start_q(weight, 3, seed=1)
    assert q.shape == (16, 3)
    assert q.dtype == torch.float32
    torch.manual_seed(5)
    assert torch.equal(q, start_q(weight, 3, seed=1))
    assert not torch.equal(q, start_q(weight, 3, seed=2))
    assert not torch.equal(q, start_q(Param("other", (32, 8, 2)), 3, seed=1))
    assert torch.linalg.matrix_rank(q) == 3


def test_drawing_a_start_leaves_the_users_random_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    start_q(Param("weight", (32, 8)), 2, seed=0)
    assert torch.equal(torch.rand(3), expected)
