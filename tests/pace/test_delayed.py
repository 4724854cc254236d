"""Delayed averages: the same as a loop that applies the mean of k steps ago, and nothing twice or never."""

from __future__ import annotations

import io
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from delayed_runs import backward, make_model, train, weights
from torch import nn

import gradsync as gs

RICH = gs.by_parameter([gs.rule(dims=1, compress=gs.sign()), gs.rule("2.*", compress=gs.powersgd(2))])


def like_by_hand(k: int, steps: int, to_none: bool) -> None:
    model, optimizer, sync = train(gs.Plan(pace=gs.delayed(k), bucket_bytes=1024))
    for step in range(steps):
        backward(model, step)
        assert sync.mid_window == (step < k)
        optimizer.step()
        optimizer.zero_grad(to_none)
    while sync.drain():
        optimizer.step()
        optimizer.zero_grad(to_none)
    sync.detach()
    by_hand, optimizer = make_model()
    means: list[list[torch.Tensor]] = []
    for step in range(steps + k):
        if step < steps:
            backward(by_hand, step)
            means.append([_mean(param.grad) for param in by_hand.parameters()])
        optimizer.zero_grad()
        if step >= k:
            for param, mean in zip(by_hand.parameters(), means[step - k], strict=True):
                param.grad = mean
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_world_size() < 3:  # of three the order of adding up matters
        assert torch.equal(weights(model), weights(by_hand))
    torch.testing.assert_close(weights(model), weights(by_hand))


def _mean(grad: torch.Tensor | None) -> torch.Tensor:
    assert grad is not None
    mean = grad / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


@pytest.mark.parametrize(
    ("ranks", "k", "to_none"), [(1, 1, True), (2, 1, False), (2, 3, True), (2, 2, False), (3, 2, True)]
)
def test_it_equals_the_loop_by_hand(ranks: int, k: int, to_none: bool, run: Callable[..., Any]) -> None:
    run(like_by_hand, k, 6, to_none, ranks=ranks)


def applied_once(combine: str) -> None:
    """Every gradient is a power of two of its own, so that a sum tells which were applied, and how often."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.no_grad():
        model.weight.zero_()
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.delayed(2), combine=combine))  # type: ignore[arg-type]
    share, expected, size = (1 if combine == "sum" else 1 / dist.get_world_size()), 0.0, dist.get_world_size()
    step = 0
    for steps in (0, 1, 2, 3, 4):  # between two drains
        for _ in range(steps):
            model(torch.full((1, 1), 2.0 ** (step * size + dist.get_rank()))).sum().backward()
            expected -= sum(2.0 ** (step * size + rank) for rank in range(size)) * share
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        drained = 0
        while sync.drain():
            optimizer.step()
            optimizer.zero_grad()
            drained += 1
        assert drained == min(steps, 2)
        assert model.weight.item() == expected
    sync.detach()


@pytest.mark.parametrize(("ranks", "combine"), [(1, "mean"), (2, "mean"), (2, "sum")])
def test_every_gradient_is_applied_exactly_once(ranks: int, combine: str, run: Callable[..., Any]) -> None:
    run(applied_once, combine, ranks=ranks)


def resume_everywhere(compressed: bool) -> None:
    plan = gs.Plan(pace=gs.delayed(2), compress=RICH if compressed else None)
    steps, saved = 5, []
    model, optimizer, sync = train(plan)
    for step in range(steps):
        file = io.BytesIO()
        torch.save(sync.state_dict(), file)
        saved.append((file, deepcopy(model.state_dict()), deepcopy(optimizer.state_dict()), sync.mid_window))
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    final = sync.state_dict()
    sync.detach()
    for begin, (file, values, momentum, mid_window) in enumerate(saved):
        other, optimizer, sync = train(plan)
        other.load_state_dict(values)
        optimizer.load_state_dict(momentum)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        assert {key: value.shape for key, value in state.items()} == {key: value.shape for key, value in final.items()}
        sync.load_state_dict(state)
        assert sync.mid_window == mid_window
        for step in range(begin, steps):
            backward(other, step)
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(weights(other), weights(model)), f"resumed before step {begin}"
        for key, tensor in sync.state_dict().items():
            assert torch.equal(tensor.nan_to_num(), final[key].nan_to_num()), f"{key}, resumed before step {begin}"
        sync.detach()


@pytest.mark.parametrize("compressed", [False, True])
def test_a_resumed_run_continues_to_the_bit_from_every_step(compressed: bool, run: Callable[..., Any]) -> None:
    run(resume_everywhere, compressed)


def conserve(compress: gs.Compressor, drains: bool) -> None:
    model = nn.Linear(16, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.delayed(2), compress=compress))
    start, brought = model.weight.detach().clone(), torch.zeros(8, 16)
    for step in range(6):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        gradient = torch.randn(8, 16, generator=generator)
        (model.weight * gradient + 0 * model(torch.zeros(1, 16)).sum()).sum().backward()
        brought += _mean(gradient)
        optimizer.step()
        optimizer.zero_grad()
    while drains and sync.drain():
        optimizer.step()
        optimizer.zero_grad()
    owed = sync.residuals()["weight"]
    dist.all_reduce(owed)
    state = sync.state_dict()
    waiting = sum(state[f"gradsync.pace.delayed.average{slot}.of.weight"] for slot in range(2)) if not drains else 0
    torch.testing.assert_close(start - model.weight.detach() + waiting + owed, brought, atol=1e-5, rtol=1e-5)
    sync.detach()


@pytest.mark.parametrize("drains", [True, False])
@pytest.mark.parametrize("compress", [gs.int8(), gs.topk(0.1), gs.powersgd(2)], ids=["int8", "topk", "powersgd"])
def test_what_was_brought_is_applied_or_waits_or_is_in_a_residual(
    compress: gs.Compressor, drains: bool, run: Callable[..., Any]
) -> None:
    run(conserve, compress, drains)


def run_ahead(k: int, key: str, compress: gs.Compressor | None) -> None:
    """Rank 1 begins its first backward only when rank 0 has ended k of its own."""
    model, optimizer, sync = train(gs.Plan(pace=gs.delayed(k), compress=compress))
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait([key])
    for step in range(k + 2):
        if step == k and dist.get_rank() == 0:
            store.set(key, "")
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    sync.detach()


@pytest.mark.parametrize(("k", "compress"), [(1, None), (3, None), (3, gs.int8())])
def test_a_slow_rank_is_waited_for_k_steps_later(
    k: int, compress: gs.Compressor | None, run: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    run(run_ahead, k, request.node.name, compress)
