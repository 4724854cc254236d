"""The contract that every compressor keeps to when ranks synchronize by it: a suite over all of them."""

from __future__ import annotations

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
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from yardstick import assert_replicas_equal

every = pytest.mark.parametrize("name", EVERY)
with_feedback = pytest.mark.parametrize("name", WITH_FEEDBACK)


def averages(name: str, steps: int, **plan: Any) -> list[Grads]:
    """The averaged gradients of every step, and what this rank has left over at the end."""
    model = Given(brings(0))
    with attached(model, EVERY[name], **plan) as sync:
        found = [backward(model, brings(step)) for step in range(steps)]
        return [*found, sync.residuals()]


def averages_by_ddp(steps: int) -> list[Grads]:
    model = Given(brings(0))
    ddp = DistributedDataParallel(model)
    return [backward(ddp, brings(step)) for step in range(steps)]


def check_bits(name: str) -> None:
    first = averages(name, 4)
    for step, grads in enumerate(first[:-1]):
        assert_replicas_equal({f"{name}, step {step}, {param}": grad for param, grad in grads.items()})
    variants: dict[str, dict[str, Any]] = {
        "a second run": {},
        "one bucket, after backward": {"bucket_bytes": 1 << 20, "overlap": "none"},
    }
    for what, plan in variants.items():
        for step, (ours, theirs) in enumerate(zip(averages(name, 4, **plan), first, strict=True)):
            assert_equal(ours, theirs, f"{what}, step {step}")


@every
def test_every_rank_every_run_and_every_division_into_buckets_has_the_same_bits(
    name: str, run: Callable[..., Any]
) -> None:
    for ranks in (2, 3):
        run(check_bits, name, ranks=ranks)


def check_conservation(name: str) -> None:
    model, gave, took = Given(brings(0)), {}, {}
    with attached(model, EVERY[name]) as sync:
        for step in range(6):
            add(took, backward(model, brings(step)))
            add(gave, mean_of(step))
        assert_conserved(gave, took, left_over(sync), name)


@with_feedback
def test_what_was_not_applied_is_in_the_residuals(name: str, run: Callable[..., Any]) -> None:
    for ranks in (2, 3):
        run(check_conservation, name, ranks=ranks)


def check_exact_steps(exact_steps: dict[str, int], steps: int) -> None:
    by_ddp = averages_by_ddp(steps)
    for name, number in exact_steps.items():
        ours = averages(name, steps)
        for step in range(number):
            assert_equal(ours[step], by_ddp[step], f"{name}, step {step}")
        for step in range(number, steps):
            assert not torch.equal(ours[step]["first"], by_ddp[step]["first"]), f"{name}: step {step} is exact too"


def test_the_first_synchronization_and_warm_up_and_one_host_are_exact_like_ddp(run: Callable[..., Any]) -> None:
    run(check_exact_steps, {name: 1 for name in EVERY if name not in ("warmup", "across_hosts")}, 2)
    run(check_exact_steps, {"warmup": 3, "across_hosts": 4}, 4)


def fit(names: list[str], steps: int) -> dict[str, float]:
    """The loss of a small regression after so many steps, as a part of what it was."""
    found = {}
    for name in names:
        torch.manual_seed(0)
        truth = nn.Linear(16, 8)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
        losses = []
        with attached(model, EVERY[name], optimizer=optimizer):
            for _ in range(steps):
                loss = (model(x) - truth(x).detach()).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            assert_replicas_equal(model)
        found[name] = losses[-1] / losses[0]
    return found


def test_a_tiny_model_converges_with_every_compressor(run: Callable[..., Any]) -> None:
    for found in run(fit, list(EVERY), 40):
        assert found["across_hosts"] < 0.15, "on one host this is the exact mean"
        assert {name: part for name, part in found.items() if part > 1.1 * found["across_hosts"]} == {}
