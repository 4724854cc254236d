"""A NaN or an Inf of one rank is seen by all, once: it is not left in what compressors keep."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compress_cases import (
    EVERY,
    WITH_FEEDBACK,
    Given,
    Grads,
    add,
    assert_conserved,
    assert_equal,
    attached,
    backward,
    brings,
    left_over,
    mean_of,
)

import gradsync as gs

_SPOILED_STEP = 3  # warm-up is over


def spoiled(step: int, value: float) -> Grads:
    """What this rank brings; on rank 1 with `value` in the middle of one gradient."""
    grads = brings(step)
    if dist.get_rank() == 1 and step == _SPOILED_STEP:
        grads["second"][17, 5] = value
    return grads


def check_law_from_here(model: Given, sync: gs.GradSync, steps: range, what: str) -> None:
    """Nothing of what went wrong before is in what comes now."""
    gave, took = left_over(sync), {}
    for step in steps:
        grads = backward(model, brings(step))
        assert all(bool(grad.isfinite().all()) for grad in grads.values()), what
        add(took, grads)
        add(gave, mean_of(step))
    if what in WITH_FEEDBACK:
        assert_conserved(gave, took, left_over(sync), what)


def see_it_once(names: list[str], value: float) -> None:
    for name in names:
        model = Given(brings(0))
        with attached(model, EVERY[name]) as sync:
            for step in range(_SPOILED_STEP + 1):
                grads = backward(model, spoiled(step, value))
                assert bool(grads["second"].isfinite().all()) == (step != _SPOILED_STEP), f"{name}, step {step}"
            assert all(bool(left.isfinite().all()) for left in sync.residuals().values()), name
            check_law_from_here(model, sync, range(_SPOILED_STEP + 1, _SPOILED_STEP + 4), name)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_every_rank_sees_it_and_the_next_step_is_clean(value: float, run: Callable[..., Any]) -> None:
    run(see_it_once, list(EVERY), value, ranks=3)


def survive_huge_numbers(names: list[str]) -> None:
    """Near the end of fp32 some overflow and some do not; afterwards all are finite."""
    for name in names:
        model = Given(brings(0))
        with attached(model, EVERY[name]) as sync:
            for step in range(_SPOILED_STEP + 3):
                grads = backward(model, spoiled(step, 3e38))
            assert all(bool(grad.isfinite().all()) for grad in grads.values()), name
            assert all(bool(left.isfinite().all()) for left in sync.residuals().values()), name


def test_huge_gradients_leave_nothing_infinite_behind(run: Callable[..., Any]) -> None:
    run(survive_huge_numbers, list(EVERY))


def guard_against_it(names: list[str], policy: str) -> list[str]:
    said = []
    for name in names:
        model = Given(brings(0))
        with attached(model, EVERY[name], guard=gs.Guard(nonfinite=policy)) as sync:
            for step in range(_SPOILED_STEP):
                backward(model, spoiled(step, torch.nan))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    assert backward(model, spoiled(_SPOILED_STEP, torch.nan)) == {}, name
                    said.append(str(caught[-1].message))
                except gs.NonFinite as error:
                    said.append(str(error))
            assert sync.dropped, name
            assert all(param.grad is None for param in model.parameters()), name
            check_law_from_here(model, sync, range(_SPOILED_STEP + 1, _SPOILED_STEP + 3), name)
    return said


@pytest.mark.parametrize(
    ("policy", "consequence"),
    [
        ("skip", ": the step is skipped"),
        ("raise", "; no rank has applied this step"),
    ],
)
def test_a_guard_drops_the_step_on_every_rank_and_training_goes_on(
    policy: str, consequence: str, run: Callable[..., Any]
) -> None:
    for said in run(guard_against_it, list(EVERY), policy):
        assert len(said) == len(EVERY)
        for message in said:
            assert f"rank 1 has NaN or Inf in the gradient of weights.second (1 element){consequence}" in message


def weigh_nothing(names: list[str]) -> None:
    """A rank of weight 0 brings nothing, not even its NaN."""
    for name in names:
        averages = []
        for value in (torch.nan, 1.0):
            model = Given(brings(0))
            with attached(model, EVERY[name]) as sync:
                for step in range(_SPOILED_STEP + 1):
                    sync.set_batch_weight(0 if dist.get_rank() == 1 else 1)
                    grads = backward(model, spoiled(step, value))
            averages.append(grads)
        assert_equal(*averages, name)


def test_the_nan_of_a_rank_that_weighs_nothing_is_not_seen(run: Callable[..., Any]) -> None:
    run(weigh_nothing, ["error_feedback(bf16)", "int8", "randomk", "powersgd"])
