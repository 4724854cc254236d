"""Windows, weights and uneven inputs: the mean is over what the user means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs
from gradsync.plan import paces
from models import Convolution, mlp
from yardstick import assert_replicas_equal


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = mlp()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _micro_batch(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * dist.get_rank() + step))


def accumulate_like_ddp(k: int, steps: int) -> None:
    model, optimizer = _model()
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.accumulate(k), bucket_bytes=1024))
    for step in range(steps):
        model(_micro_batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    ddp_model, ddp_optimizer = _model()
    ddp = DistributedDataParallel(ddp_model)
    for step in range(steps):
        last = step % k == k - 1
        if last:
            (ddp(_micro_batch(step)).square().mean() / k).backward()
            ddp_optimizer.step()
            ddp_optimizer.zero_grad()
        else:
            with ddp.no_sync():
                (ddp(_micro_batch(step)).square().mean() / k).backward()
    for ours, theirs in zip(model.parameters(), ddp_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert sync.stats()["steps"] == steps // k
    sync.detach()


@pytest.mark.parametrize("k", [1, 2, 4])
def test_accumulate_needs_no_change_to_the_loop_and_equals_ddp(k: int, run: Callable[..., Any]) -> None:
    run(accumulate_like_ddp, k, 8)


def hide_gradients() -> None:
    model, optimizer = _model()
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.accumulate(3)))
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(2):
        model(_micro_batch(step)).square().mean().backward()
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert not optimizer.state, "AdamW touched its state"
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    model(_micro_batch(2)).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    sync.detach()


def test_inside_a_window_steps_do_nothing(run: Callable[..., Any]) -> None:
    run(hide_gradients)


def drain_short_window(lengths: list[int]) -> list[float]:
    """The last window holds fewer micro-batches, not equally many on all ranks."""
    model = nn.Linear(1, 1, bias=False)
    sync = gs.attach(model, None, gs.Plan(pace=gs.accumulate(4)))
    for i in range(lengths[dist.get_rank()]):
        model(torch.full((1, 1), float(10 * dist.get_rank() + i))).sum().backward()
    sync.drain()
    value = [] if model.weight.grad is None else model.weight.grad.flatten().tolist()
    sync.detach()
    return value


def test_a_short_last_window_is_the_mean_of_what_it_holds(run: Callable[..., Any]) -> None:
    assert run(drain_short_window, [2, 2]) == [[(0 + 1 + 10 + 11) / 4]] * 2
    assert run(drain_short_window, [3, 1]) == [[(0 + 1 + 2 + 10) / 4]] * 2
    assert run(drain_short_window, [0, 0]) == [[]] * 2


def two_losses_per_batch() -> list[float]:
    model = nn.Linear(1, 1, bias=False)
    sync = gs.attach(model, None, gs.Plan(pace=gs.accumulate(2, backwards=2)))
    for i in range(2):
        for j in range(2):
            model(torch.full((1, 1), float(dist.get_rank() + i + 10 * j))).sum().backward()
    value = model.weight.grad.flatten().tolist()
    assert sync.stats()["steps"] == 1
    sync.detach()
    return value


def test_several_losses_per_micro_batch_are_added_not_averaged(run: Callable[..., Any]) -> None:
    # Per micro-batch: (r+i) + (r+i+10); mean over i in {0, 1} and r in {0, 1}
    assert run(two_losses_per_batch) == [[12.0]] * 2


def no_sync_like_ddp() -> None:
    model, optimizer = _model()
    sync = gs.attach(model, optimizer, gs.Plan(bucket_bytes=1024))
    ddp_model, ddp_optimizer = _model()
    ddp = DistributedDataParallel(ddp_model)
    for forward, opt, no_sync in ((model, optimizer, sync.no_sync), (ddp, ddp_optimizer, ddp.no_sync)):
        for step in range(9):
            if step % 3 < 2:
                with no_sync():
                    forward(_micro_batch(step)).square().mean().backward()
            else:
                forward(_micro_batch(step)).square().mean().backward()
                opt.step()
                opt.zero_grad()
    for ours, theirs in zip(model.parameters(), ddp_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    sync.detach()


def test_no_sync_has_the_meaning_it_has_in_ddp(run: Callable[..., Any]) -> None:
    run(no_sync_like_ddp)


def weighted(weights: list[list[float]], dtype: torch.dtype, plan: gs.Plan) -> list[float]:
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    sync = gs.attach(model, None, plan)
    values = []
    for step_weights in weights:
        sync.set_batch_weight(step_weights[dist.get_rank()])
        for _ in range(2 if isinstance(plan.pace, paces.Accumulate) else 1):
            model(torch.full((1, 1), float(dist.get_rank() + 1), dtype=dtype)).sum().backward()
        values.append(model.weight.grad.item())
        model.zero_grad()
    sync.detach()
    return values


@pytest.mark.parametrize("plan", [gs.Plan(), gs.Plan(overlap="none"), gs.Plan(pace=gs.accumulate(2))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_give_the_weighted_mean(plan: gs.Plan, dtype: torch.dtype, run: Callable[..., Any]) -> None:
    weights = [[1.0, 3.0], [8192.0, 8192.0], [0.0, 4096.0], [1.0, 1.0]]
    if dtype == torch.float16:
        weights = [[8192.0, 24576.0], *weights[1:3]]  # w·g alone would overflow
    expected = [(a * 1 + b * 2) / (a + b) for a, b in weights]
    for values in run(weighted, weights, dtype, plan):
        assert values == pytest.approx(expected, rel=1e-3)


def weigh_too_late() -> str:
    model = mlp()
    sync = gs.attach(model, None, gs.Plan(pace=gs.accumulate(2, backwards=2)))
    model(torch.randn(2, 8)).sum().backward()
    with pytest.raises(gs.GradSyncError) as caught:
        sync.set_batch_weight(2)
    sync.drain()
    sync.set_batch_weight(2)
    for bad in (-1, float("nan"), float("inf"), "three"):
        with pytest.raises(ValueError, match="a batch weight must be a number from 0 to"):
            sync.set_batch_weight(bad)  # type: ignore[arg-type]
    sync.detach()
    return str(caught.value)


def test_a_weight_after_the_first_backward_of_a_micro_batch_is_an_error(run: Callable[..., Any]) -> None:
    for message in run(weigh_too_late):
        assert "set_batch_weight() came after the micro-batch's first backward; call it before" in message


def summed() -> list[float]:
    model = nn.Linear(1, 1, bias=False)
    sync = gs.attach(model, None, gs.Plan(combine="sum"))
    model(torch.full((1, 1), float(dist.get_rank() + 1))).sum().backward()
    with pytest.raises(ValueError, match=r'batch weights need combine="mean"'):
        sync.set_batch_weight(2)
    sync.detach()
    return model.weight.grad.flatten().tolist()


def test_sum_is_the_sum(run: Callable[..., Any]) -> None:
    assert run(summed, ranks=3) == [[6.0]] * 3


def sum_twice() -> list[float]:
    model = nn.Linear(1, 1, bias=False)
    sync = gs.attach(model, None, gs.Plan(combine="sum"))
    for step in range(3):
        model(torch.full((1, 1), float(dist.get_rank() + step))).sum().backward()
    sync.detach()
    return model.weight.grad.flatten().tolist()


def test_a_sum_that_stands_is_not_summed_again(run: Callable[..., Any]) -> None:
    assert run(sum_twice) == [[(0 + 1) + (1 + 2) + (2 + 3)]] * 2


def train_unevenly(batches: list[int], plan: gs.Plan, with_buffers: bool) -> dict[str, Any]:
    """Every rank has its own number of batches; compare with weights computed by hand on the joined data."""
    torch.manual_seed(0)
    model = Convolution() if with_buffers else nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    sync = gs.attach(model, optimizer, plan)
    rank = dist.get_rank()
    with sync.join():
        for step in range(batches[rank]):
            x = torch.randn(4, 3, 8, 8) if with_buffers else torch.full((1, 1), float(rank + 1 + step))
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        sync.drain()
        optimizer.step()
    assert_replicas_equal(model)
    assert_replicas_equal(dict(model.named_buffers()))
    momentum = [state["momentum_buffer"] for state in optimizer.state.values()]
    assert_replicas_equal({str(i): each for i, each in enumerate(momentum)})
    # The GradSync goes on working after the block
    optimizer.zero_grad()
    model(torch.randn(4, 3, 8, 8) if with_buffers else torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert_replicas_equal(model)
    sync.detach()
    return {"weight": next(model.parameters()).flatten()[0].item()}


@pytest.mark.parametrize("batches", [[3, 3], [5, 2], [0, 4], [4, 0]])
def test_ranks_may_have_unequally_many_batches(batches: list[int], run: Callable[..., Any]) -> None:
    first, second = run(train_unevenly, batches, gs.Plan(), False)
    assert first == second


def uneven_values(batches: list[int]) -> list[float]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = gs.attach(model, optimizer)
    rank = dist.get_rank()
    seen = []
    with sync.join():
        for step in range(batches[rank]):
            model(torch.full((1, 1), float(10 * rank + step))).sum().backward()
            seen.append(model.weight.grad.item())
            optimizer.step()
            optimizer.zero_grad()
    sync.detach()
    return [*seen, model.weight.item()]


def test_a_rank_out_of_data_has_weight_zero(run: Callable[..., Any]) -> None:
    means = [(0 + 10 + 20) / 3, (1 + 21) / 2, 22.0]
    first, second, third = run(uneven_values, [2, 1, 3], ranks=3)
    assert first == pytest.approx([*means[:2], -sum(means)])
    assert second == pytest.approx([means[0], -sum(means)])
    assert third == pytest.approx([*means, -sum(means)])


@pytest.mark.parametrize("ranks", [2, 3])
def test_join_serves_buffers_and_windows_too(ranks: int, run: Callable[..., Any]) -> None:
    run(train_unevenly, [1, 4, 2][:ranks], gs.Plan(bucket_bytes=1024), True, ranks=ranks)


def look_inside_of_a_window() -> list[float]:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.accumulate(2), combine="sum"))
    sums = []
    for batch in range(4):  # nobody sets .grad to zero
        model(torch.full((1, 1), 2.0 ** (2 * batch + dist.get_rank()))).sum().backward()
        if batch == 2:
            output = model(torch.ones(1, 1))
            torch.autograd.grad(output.sum(), output)
        if not sync.mid_window:
            assert model.weight.grad is not None
            sums.append(model.weight.grad.item())
    sync.detach()
    return sums


def test_a_look_inside_of_a_window_moves_no_sum(run: Callable[..., Any]) -> None:
    """`torch.autograd.grad` inside of a window brings no gradient, and takes none away."""
    assert run(look_inside_of_a_window) == [[15.0, 255.0], [15.0, 255.0]]
