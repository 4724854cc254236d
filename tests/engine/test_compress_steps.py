"""Compression with all that steps can be: windows, sums, weights, uneven inputs, and steps that come to nothing.

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

import gradsync as gs
from yardstick import assert_replicas_equal

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


# Steps that come to nothing


def abort_a_step(names: list[str]) -> None:
    """Rank 1 raises in the middle of backward of step 2; from the next step on the law holds as ever."""
    for name in names:
        model, took = Given(brings(0)), {}
        with attached(model, EVERY[name]) as sync, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(2):
                backward(model, brings(step))
            if dist.get_rank() == 1:
                handle = model.weights["second"].register_hook(_raise)
                with pytest.raises(ArithmeticError):
                    backward(model, brings(2))
                handle.remove()
            else:
                assert backward(model, brings(2)) == {}, name
            # On the rank that raised the next forward ends what it began, so the law begins after one more step.
            backward(model, brings(3))
            gave = left_over(sync)
            for step in (4, 5):
                add(took, backward(model, brings(step)))
                add(gave, mean_of(step))
            assert_conserved(gave, took, left_over(sync), name)
            assert sync.stats()["steps"] == 6, "the step that was dropped counts"


def _raise(grad: torch.Tensor) -> None:
    raise ArithmeticError("a user's own exception")


def test_a_step_that_a_rank_aborted_is_dropped_and_all_go_on(run: Callable[..., Any]) -> None:
    run(abort_a_step, WITH_FEEDBACK)
    run(abort_a_step, FAMILIES, ranks=3)
