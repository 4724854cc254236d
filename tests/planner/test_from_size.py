"""A model described by its size alone: the right number of parameters, in the right order, at the right times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsync.planner.from_size import describe, shape_of
from gradsync.planner.profile import ModelProfile


def numel(profile: ModelProfile, part: str) -> int:
    return sum(torch.Size(g.shape).numel() for g in profile.gradients if part in g.name)


@given(st.floats(4, 13).map(lambda exponent: 10**exponent), st.sampled_from([None, 1, 2, 12, 64]))
def test_the_number_of_parameters_is_met_to_a_thousandth(params: float, layers: int | None) -> None:
    params = max(params, 1e4 * (layers or 1))
    shape = shape_of(params, layers)
    block = 4 * shape.width**2 + 2 * shape.width * shape.hidden + 2 * shape.width
    total = shape.vocabulary * shape.width + shape.layers * block + shape.width
    assert total == pytest.approx(params, rel=1e-3)
    assert shape.layers == layers or layers is None
    assert shape.vocabulary * shape.width < 0.4 * params


@pytest.mark.parametrize("params", [1e4, 1e6, 1.24e8, 1e9, 7e10])
def test_the_gradients_are_as_many_as_were_asked_for(params: float) -> None:
    profile = describe(params)
    assert profile.num_params == pytest.approx(params, rel=1e-3)
    assert len(profile.gradients) < 1000


def test_a_billion_parameters_and_8192_tokens_take_an_a100_350_ms() -> None:
    profile = describe(1e9, "fp16", 8192, flops=312e12, mfu=0.45)
    assert profile.forward_s + profile.backward_s == pytest.approx(0.350, rel=0.001)
    assert profile.backward_s == pytest.approx(2 * profile.forward_s)
    assert profile.nbytes == pytest.approx(2e9, rel=1e-3)
    assert (profile.source, profile.tokens, profile.name) == ("described", 8192, "1B parameters")


def test_an_h100_takes_124_ms() -> None:
    assert describe(1e9, tokens=8192, flops=989e12, mfu=0.4).compute_s == pytest.approx(0.124, rel=0.005)


def test_gradients_come_last_block_first_and_the_embedding_at_the_end() -> None:
    profile = describe(1e8, layers=3)
    blocks = [g.name.split(".")[1] for g in profile.gradients if g.name.startswith("blocks")]
    assert blocks == sorted(blocks, reverse=True)
    assert set(blocks) == {"0", "1", "2"}
    last = profile.gradients[-1]
    assert last.name == "embedding"
    assert last.ready_s == pytest.approx(profile.backward_s)


def test_a_gradient_is_ready_when_the_work_down_to_it_is_done() -> None:
    """The head comes first in backward, with the embedding's matrix; then the blocks, each the same work."""
    profile = describe(1e9, layers=10)
    head_s = profile.backward_s * numel(profile, "embedding") / profile.num_params
    ready = {g.name: g.ready_s for g in profile.gradients}
    assert ready["norm"] == pytest.approx(head_s, rel=1e-3)
    for index in range(10):
        done = (10 - index) / 10
        assert ready[f"blocks.{index}.norm1"] == pytest.approx(head_s + done * (profile.backward_s - head_s), rel=1e-3)


def test_the_optimizer_takes_the_time_of_its_memory_traffic() -> None:
    """Adam moves 28 bytes per parameter: 14 ms for a billion at 2 TB/s."""
    assert describe(1e9, memory_bandwidth=2e12).optimizer_s == pytest.approx(14e-3, rel=1e-3)
    assert describe(1e9).optimizer_s == 0.0


@pytest.mark.parametrize(("dtype", "itemsize"), [("fp16", 2), ("bf16", 2), ("fp32", 4)])
def test_the_dtype_is_that_of_the_gradients(dtype: str, itemsize: int) -> None:
    profile = describe(1e6, dtype)
    assert profile.nbytes == itemsize * profile.num_params


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"tokens": 0}, r"tokens must be a positive number \(of one rank in one step\), got 0"),
        ({"tokens": float("nan")}, "tokens must be a positive number"),
        ({"mfu": 1.2}, r"mfu must be a share of the device's peak, over 0 and at most 1, got 1.2 \(0.45 is 45 %\)"),
        ({"mfu": 0}, "mfu must be a share"),
        ({"params": 9999}, r"params must be a number of at least 10000 \(1e9 is a billion parameters\), got 9999"),
        ({"params": float("inf")}, "params must be a number"),
        ({"dtype": "fp8"}, "dtype must be one of fp16, bf16, fp32 .*, got 'fp8'"),
        ({"flops": 0}, "flops must be a positive number of operations per second, got 0"),
        ({"memory_bandwidth": -1}, "memory_bandwidth must be a number of bytes per second, 0 if unknown, got -1"),
        ({"layers": 0}, "layers must be a whole number of at least 1, or None to choose one, got 0"),
        ({"params": 1e6, "layers": 5000}, "layers must be at most 868 in a model of 1M parameters, got 5000"),
    ],
)
def test_wrong_numbers_are_refused_in_a_sentence(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        describe(**wrong)
