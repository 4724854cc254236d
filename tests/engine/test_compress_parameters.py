"""Compression of parameters of every kind: unused, frozen, sparse, complex, of any precision and layout.

The law is the same throughout: what was given is applied, or is in somebody's residual.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compress_cases import (
    EVERY,
    SHAPES,
    WITH_FEEDBACK,
    Given,
    add,
    assert_conserved,
    attached,
    backward,
    brings,
    left_over,
    mean_of,
)
from torch import nn

import gradsync as gs
from yardstick import assert_replicas_equal

# Parameters that come and go


def leave_out(names: list[str]) -> None:
    """Of rank 1 no gradient of `second` comes, ever; of `third` none from anybody in step 2."""
    rank = dist.get_rank()
    for name in names:
        model, gave, took = Given(brings(0)), {}, {}
        with attached(model, EVERY[name]) as sync:
            for step in range(5):
                used = {param for param in SHAPES if (param, rank) != ("second", 1) and (param, step) != ("third", 2)}
                grads = backward(model, {param: grad for param, grad in brings(step).items() if param in used})
                assert set(grads) == set(SHAPES) - ({"third"} if step == 2 else set()), name
                add(took, grads)
                for each in range(dist.get_world_size()):
                    add(gave, {p: g for p, g in brings(step, each).items() if (p, each) != ("second", 1)}, 0.5)
            left = left_over(sync)
            del gave["third"]
            assert_conserved(gave, took, left, name)
            assert grads["third"].count_nonzero() > 0, name


def test_unused_parameters_count_as_zeros_or_stay_without_a_gradient(run: Callable[..., Any]) -> None:
    run(leave_out, WITH_FEEDBACK)


def freeze_and_thaw(names: list[str]) -> None:
    """What others wait to send survives the new buckets."""
    for name in names:
        model, gave, took = Given(brings(0)), {}, {}
        with attached(model, EVERY[name]) as sync:
            for step in range(6):
                frozen = {"second"} if step in (2, 3) else set()
                for param, weight in model.weights.items():
                    weight.requires_grad_(param not in frozen)
                grads = backward(model, brings(step))
                assert set(grads) == set(SHAPES) - frozen
                add(took, grads)
                add(gave, mean_of(step))
            del gave["second"]
            assert_conserved(gave, took, left_over(sync), name)


def test_freezing_a_parameter_loses_nothing_of_the_others(run: Callable[..., Any]) -> None:
    run(freeze_and_thaw, WITH_FEEDBACK)


def vanish(low: int) -> list[float]:
    """What PowerSGD is off by, step by step; in steps 1 and 2 the gradient is of a low rank."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(32, 4, generator=generator), torch.randn(4, 24, generator=generator)
    whole, part = left @ right, left[:, :low] @ right[:low]
    rank, size = dist.get_rank(), dist.get_world_size()
    model, errors = Given({"weight": whole}), []
    with attached(model, gs.powersgd(4)):
        for step in range(7):
            mean = part if step in (1, 2) else whole
            taken = backward(model, {"weight": mean * (2 * (rank + 1) / (size + 1))})["weight"]
            errors.append(float((taken - mean).norm() / whole.norm()))
    return errors


@pytest.mark.parametrize("low", [0, 1])
def test_powersgd_finds_all_again_after_gradients_of_a_low_rank(low: int, run: Callable[..., Any]) -> None:
    for errors in run(vanish, low):
        # Two steps to find it again; sent whole from then on, up to columns that are orthogonal to a few percent.
        assert max(errors[5:]) < 0.05


# What parameters are made of


def pass_exactly(names: list[str]) -> None:
    """Sparse and complex gradients, beside others that are compressed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for name in names:
        torch.manual_seed(0)
        embedding = nn.Embedding(50, 8, sparse=True)
        given = Given({"dense": torch.zeros(64, 64), "complex": torch.zeros(9, 4, dtype=torch.complex64)})
        model = nn.ModuleList([embedding, given])
        model.forward = lambda grads, embedding=embedding, given=given: (
            given(grads)
            + embedding(  # type: ignore[method-assign]
                torch.tensor([dist.get_rank(), 7, 7])
            ).sum()
        )
        with attached(model, EVERY[name]):
            for _ in range(3):
                grads = backward(
                    model,
                    {
                        "dense": torch.randn(64, 64, generator=torch.Generator().manual_seed(rank)),
                        "complex": torch.full((9, 4), complex(rank, 1)),
                    },
                )
                counts = torch.zeros(50, 8)
                counts[:size] += 1 / size
                counts[7] += 2
                assert grads["weight"].is_sparse
                torch.testing.assert_close(grads["weight"].to_dense(), counts, msg=name)
                assert torch.equal(grads["complex"], torch.full((9, 4), complex((size - 1) / 2, 1))), name


def test_sparse_and_complex_gradients_travel_as_they_are(run: Callable[..., Any]) -> None:
    run(pass_exactly, ["fp16", "int8", "topk", "randomk", "powersgd"])


def narrow_and_wide(names: list[str], dtype: torch.dtype) -> None:
    for name in names:
        model, gave, took = Given(brings(0, dtype=dtype)), {}, {}
        with attached(model, EVERY[name]) as sync:
            for step in range(4):
                grads = backward(model, brings(step, dtype=dtype))
                assert {grad.dtype for grad in grads.values()} == {dtype}
                assert_replicas_equal({f"{name} {param}": grad for param, grad in grads.items()})
                add(took, grads)
                add(gave, mean_of(step, dtype))
            left = left_over(sync)
        for param in SHAPES:
            # Division by the number of ranks, payload and result are rounded to the parameter's dtype in each step.
            off = (took[param] + left[param] - gave[param]).abs().max()
            grain = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
            if name in WITH_FEEDBACK and not ("bf16" in name and dtype == torch.float64):
                assert off <= 40 * grain * float(brings(0)[param].abs().max()), f"{name} {param}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_parameters_of_any_precision_are_served(dtype: torch.dtype, run: Callable[..., Any]) -> None:
    run(narrow_and_wide, list(EVERY), dtype)


def convolve(names: list[str]) -> None:
    """A weight in channels_last, beside its like in the usual layout."""
    for name in names:
        weight = torch.zeros(16, 12, 3, 3)
        model = Given({"usual": weight, "last": weight.contiguous(memory_format=torch.channels_last)})
        gave, took = {}, {}
        with attached(model, EVERY[name]) as sync:
            for step in range(4):
                ranks = [
                    torch.randn(2, *weight.shape, generator=torch.Generator().manual_seed(10 * step + rank))
                    for rank in range(dist.get_world_size())
                ]
                grads = backward(model, dict(zip(("usual", "last"), ranks[dist.get_rank()], strict=True)))
                for param, value in model.weights.items():
                    assert value.grad.stride() == value.stride(), f"{name} {param}: another layout than the parameter"
                add(took, grads)
                add(gave, dict(zip(("usual", "last"), torch.stack(ranks).double().mean(0), strict=True)))
            assert_conserved(gave, took, left_over(sync), name)


def test_channels_last_is_compressed_as_it_lies_in_memory(run: Callable[..., Any]) -> None:
    run(convolve, WITH_FEEDBACK)


# Rules that fit nothing


def misspell() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with attached(Given(brings(0)), gs.warmup(gs.by_parameter({"*.frist": gs.int8(), "*.second": None}), 2)):
            pass
    return [str(warning.message) for warning in caught]


def test_a_rule_whose_pattern_fits_no_name_is_told_once(run: Callable[..., Any]) -> None:
    [message], nothing = run(misspell)
    assert message.startswith("by_parameter: no parameter's name fits '*.frist'; is it misspelt?")
    assert nothing == []
