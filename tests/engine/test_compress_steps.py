"""Compression with all that steps can be: windows, weights, uneven inputs, unused and frozen parameters, any dtype.

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
    Grads,
    add,
    assert_conserved,
    attached,
    backward,
    brings,
    grads_of,
    left_over,
    mean_of,
)
from torch import nn
from yardstick import assert_replicas_equal

import gradsync as gs

# One of each family: added up, sampled, coded in blocks, factors in two rounds.
FAMILIES = ["error_feedback(bf16)", "randomk", "int4", "topk", "powersgd"]


def accumulate_windows(names: list[str], k: int) -> None:
    for name in names:
        model, gave, took = Given(brings(0)), {}, {}
        with attached(model, EVERY[name], pace=gs.accumulate(k)) as sync:
            for micro_batch in range(3 * k):
                grads = backward(model, brings(micro_batch))
                assert bool(grads) == (micro_batch % k == k - 1)
                add(took, grads)
                add(gave, mean_of(micro_batch), 1 / k)
            assert_conserved(gave, took, left_over(sync), name)


def test_a_window_is_compressed_as_one(run: Callable[..., Any]) -> None:
    run(accumulate_windows, FAMILIES, 2)


def add_up_by_hand(names: list[str]) -> None:
    """Two backwards under no_sync() before each that synchronizes."""
    for name in names:
        model, gave, took = Given(brings(0)), {}, {}
        with attached(model, EVERY[name]) as sync:
            for step in range(3):
                model.zero_grad()
                with sync.no_sync():
                    model(brings(10 * step)).backward()
                    model(brings(10 * step + 1)).backward()
                model(brings(10 * step + 2)).backward()
                add(took, grads_of(model))
                for micro_batch in range(3):
                    add(gave, mean_of(10 * step + micro_batch))
            assert_conserved(gave, took, left_over(sync), name)


def test_what_no_sync_added_up_is_compressed_as_one(run: Callable[..., Any]) -> None:
    run(add_up_by_hand, FAMILIES)


def take_sums(names: list[str]) -> None:
    """Without zero_grad: sums that were synchronized before are not compressed again."""
    size = dist.get_world_size()
    for name in names:
        model, gave = Given(brings(0)), {}
        with attached(model, EVERY[name], combine="sum") as sync:
            for step in range(4):
                model(brings(step)).backward()
                add(gave, mean_of(step), size)
            took = {param: grad.double() for param, grad in grads_of(model).items()}
            assert_conserved(gave, took, left_over(sync), name)


def test_sums_are_compressed_like_means(run: Callable[..., Any]) -> None:
    run(take_sums, FAMILIES, ranks=3)


# Weights and uneven inputs


def weigh(name: str, weights: list[tuple[float, float]]) -> tuple[Grads, Grads, Grads]:
    """Σ w·g / Σ w of all steps, what was applied, and what is left."""
    model, gave, took = Given(brings(0)), {}, {}
    with attached(model, EVERY[name]) as sync:
        for step, pair in enumerate(weights):
            sync.set_batch_weight(pair[dist.get_rank()])
            add(took, backward(model, brings(step)))
            for rank, weight in enumerate(pair):
                add(gave, brings(step, rank), weight / sum(pair))
        return gave, took, left_over(sync)


def weigh_alike(names: list[str]) -> None:
    for name in names:
        # On average 2 on a rank: the residual then is a rank's share of the mean.
        assert_conserved(*weigh(name, [(1.0, 3.0)] * 4), name)


def test_weights_are_kept_by_compression(run: Callable[..., Any]) -> None:
    run(weigh_alike, FAMILIES)


def weigh_heavier_and_heavier(names: list[str]) -> dict[str, float]:
    """The largest gradient that is applied when weights grow, in units of the largest given."""
    found = {}
    for name in names:
        gave, took, _ = weigh(name, [(1.0, 1.0)] * 3 + [(1000.0, 1000.0)] * 3)
        found[name] = float(took["first"].abs().max() / gave["first"].abs().max())
    return found


@pytest.mark.xfail(
    reason="Reducer.finish leaves residuals in the unit of the step before when weighting.follow chooses another"
)
def test_weights_of_another_size_do_not_blow_up_what_is_kept(run: Callable[..., Any]) -> None:
    for found in run(weigh_heavier_and_heavier, FAMILIES):
        assert {name: part for name, part in found.items() if part > 2} == {}


def join_unevenly(names: list[str]) -> None:
    for name in names:
        model = Given(brings(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with attached(model, EVERY[name], optimizer=optimizer) as sync:
            with sync.join():
                for step in range(3 + 2 * dist.get_rank()):
                    backward(model, brings(step))
                    optimizer.step()
            assert_replicas_equal(model)
            assert sync.stats()["steps"] == 3 + 2 * (dist.get_world_size() - 1)
        moved = torch.cat([param.detach().flatten() for param in model.parameters()])
        assert moved.isfinite().all(), name
        assert moved.count_nonzero() > len(moved) / 2, name


def test_ranks_without_data_keep_the_others_company(run: Callable[..., Any]) -> None:
    run(join_unevenly, list(EVERY))


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


# Steps that come to nothing


def abort_a_step(names: list[str]) -> None:
    """Rank 1 raises in the middle of backward of step 2; from the next step on the law holds again."""
    for name in names:
        model, gave, took = Given(brings(0)), {}, {}
        with attached(model, EVERY[name]) as sync, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(6):
                if step == 2 and dist.get_rank() == 1:
                    handle = model.weights["second"].register_hook(_raise)
                    with pytest.raises(ArithmeticError):
                        backward(model, brings(step))
                    handle.remove()
                    model.zero_grad()
                else:
                    grads = backward(model, brings(step))
                    assert bool(grads) == (step != 2)
                if step == 2:
                    continue
                if step == 3:
                    assert sync.stats()["steps"] == 4, "the step that was dropped counts"
                add(took, grads)
                add(gave, mean_of(step))
                if step == 3:
                    before = left_over(sync)
                    gave, took = {}, {}
                    add(gave, before)
            assert_conserved(gave, took, left_over(sync), name)


def _raise(grad: torch.Tensor) -> None:
    raise ArithmeticError("a user's own exception")


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_that_a_rank_aborted_is_dropped_and_all_go_on(ranks: int, run: Callable[..., Any]) -> None:
    run(abort_a_step, WITH_FEEDBACK, ranks=ranks)
