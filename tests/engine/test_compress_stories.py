"""What a stranger found in compression, a story each."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compress_cases import Given, assert_conserved, attached, backward, left_over
from torch import nn

import gradsync as gs


def overflow(policy: str) -> str | bool:
    model = Given({"large": torch.zeros(64)})
    with attached(model, gs.fp16(), guard=gs.Guard(nonfinite=policy)) as sync:  # type: ignore[arg-type]
        backward(model, {"large": torch.ones(64)})
        try:
            if policy == "skip":
                with pytest.warns(UserWarning, match="fp16 made NaN or Inf of the average gradient of weights.large"):
                    backward(model, {"large": torch.full((64,), 1e6)})
            else:
                backward(model, {"large": torch.full((64,), 1e6)})
        except gs.NonFinite as error:
            return str(error)
        assert all(param.grad is None for param in model.parameters())
        return sync.dropped


def test_a_guard_sees_what_compression_itself_makes_infinite(run: Callable[..., Any]) -> None:
    assert run(overflow, "skip") == [True, True]
    for message in run(overflow, "raise"):
        assert "fp16 made NaN or Inf of the average gradient of weights.large; no rank has applied" in message


def all_reduce_in_turn() -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    one, other = torch.randn(100, 64, generator=generator), torch.randn(50, 64, generator=generator)
    first = gs.all_reduce(other.clone(), compress=gs.powersgd(2))
    gs.all_reduce(one.clone(), compress=gs.powersgd(2))
    assert torch.equal(gs.all_reduce(other.clone(), compress=gs.powersgd(2)), first)


def test_a_call_does_not_depend_on_the_one_before(run: Callable[..., Any]) -> None:
    run(all_reduce_in_turn)


def many_densities() -> int:
    gs.all_reduce(torch.ones(64), compress=gs.topk(0.5))
    before = len(os.listdir("/proc/self/task"))
    for number in range(30):
        gs.all_reduce(torch.ones(64), compress=gs.topk(0.1 + number / 100))
    return len(os.listdir("/proc/self/task")) - before


def test_a_schedule_of_densities_starts_no_thread_for_each(run: Callable[..., Any]) -> None:
    assert max(run(many_densities)) <= 0


def equal_numbers() -> None:
    rank = dist.get_rank()
    with attached(Given({"w": torch.zeros(64, 64)}), gs.powersgd(4, min_ratio=2 if rank else 2.0)):
        pass
    gs.all_reduce(torch.ones(64), compress=gs.topk(1 if rank else 1.0))


def test_one_and_one_point_nought_are_the_same_number(run: Callable[..., Any]) -> None:
    run(equal_numbers)
    assert repr(gs.topk(1)) == repr(gs.topk(1.0))
    assert gs.Plan(compress=gs.randomk(1)).canonical() == gs.Plan(compress=gs.randomk(1.0)).canonical()


def sample_halves() -> None:
    """Both ranks bring the same, so that the sum of two payloads is exact."""
    model, gave, took = Given({"w": torch.zeros(64, dtype=torch.bfloat16)}), {}, {}
    generator = torch.Generator().manual_seed(0)
    with attached(model, gs.randomk(0.1)) as sync:
        for _ in range(20):
            grad = torch.randn(64, generator=generator).bfloat16()
            for total, part in ((gave, grad.double()), (took, backward(model, {"w": grad})["w"].double())):
                total["w"] = total.get("w", 0) + part
        assert_conserved(gave, took, left_over(sync), "randomk")


def test_what_a_half_type_rounds_away_is_kept(run: Callable[..., Any]) -> None:
    run(sample_halves)


def leave_residuals_out() -> str:
    model = Given({"w": torch.zeros(64, 8)})
    with attached(model, gs.topk(0.1)) as sync:
        backward(model, {"w": torch.randn(64, 8)})
        torn = {key: value for key, value in sync.state_dict().items() if ".residual." not in key}
        try:
            sync.load_state_dict(torn)
        except ValueError as error:
            return str(error)
    return "loaded"


def test_a_state_without_its_residuals_is_refused(run: Callable[..., Any]) -> None:
    whole = r"rank \d cannot load its state: this state is not whole: a rank saved 1 residuals, and 0 are here; "
    for message in run(leave_residuals_out):
        assert re.match(whole, message), message


def pass_a_compressor() -> str:
    with pytest.raises(TypeError) as caught:
        gs.attach(nn.Linear(2, 2), None, gs.int8())  # type: ignore[arg-type]
    return str(caught.value)


def test_a_compressor_for_a_plan_is_told_where_it_belongs(run: Callable[..., Any]) -> None:
    for message in run(pass_a_compressor):
        assert message.endswith("(did you mean gs.Plan(compress=...)?)")
