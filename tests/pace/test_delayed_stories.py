"""Delayed averages where things are not as usual: NaN, exceptions, unused parameters, other plans."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from delayed_runs import backward, scalar, step_and_zero, train
from torch import nn

import gradsync as gs
from models import Raises, Scalar, Trapped


def abort(at: int, steps_after: bool, drains_at_once: bool) -> float:
    """Rank 1's backward raises in one step, after one gradient has arrived; its loop skips the step, or not."""
    model, optimizer, sync = scalar(2)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for step in range(at + 1 if drains_at_once else 6):
            raises = step == at and dist.get_rank() == 1
            loss = model(2.0**step)
            try:
                # What was made last is done first: `other` has its gradient before the exception.
                (Raises.apply(loss) + 0 * model.other if raises else loss).backward()
            except ArithmeticError:
                if not steps_after:
                    continue
            step_and_zero(optimizer)
        while sync.drain():
            step_and_zero(optimizer)
        sync.detach()
    said = [str(warning.message) for warning in heard if "backward did not finish on rank 1" in str(warning.message)]
    assert len(said) == 1, [str(warning.message) for warning in heard]
    return model.weight.item()


@pytest.mark.parametrize("at", [0, 2, 3, 5])
@pytest.mark.parametrize("steps_after", [False, True])
def test_a_backward_that_raised_is_dropped_everywhere_and_nothing_else(
    at: int, steps_after: bool, run: Callable[..., Any]
) -> None:
    assert run(abort, at, steps_after, False) == [-sum(2.0**step for step in range(6) if step != at)] * 2


def test_after_a_backward_that_raised_drain_applies_the_rest(run: Callable[..., Any]) -> None:
    assert run(abort, 4, False, True) == [-(1.0 + 2 + 4 + 8)] * 2


def raise_often(k: int) -> list[str]:
    """Replicas are compared in every step, and one is behind after each batch that raised there."""
    model = Trapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.delayed(k)), guard=gs.Guard(drift="raise"))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for step in range(40):
            model.armed = step % 7 == 3 and dist.get_rank() == step % 2
            try:
                backward(model, step)
            except ArithmeticError:
                continue
            step_and_zero(optimizer)
    sync.detach()
    return [str(each.message) for each in heard if "the batch is skipped" not in str(each.message)]


@pytest.mark.parametrize("k", [1, 2])
def test_a_replica_that_is_behind_has_not_drifted(k: int, run: Callable[..., Any]) -> None:
    assert run(raise_often, k) == [[], []]


def drift_after_raising() -> str:
    model, optimizer, sync = scalar(1)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for step in range(80):
            loss = model(1.0)
            try:
                (Raises.apply(loss) + 0 * model.other if step == 3 and dist.get_rank() == 1 else loss).backward()
            except ArithmeticError:
                continue
            step_and_zero(optimizer)
            if step == 10 and dist.get_rank() == 1:
                model.weight.data.add_(1.0)
    sync.detach()
    return " ".join(str(each.message) for each in heard)


def test_and_one_that_has_caught_up_is_compared_again(run: Callable[..., Any]) -> None:
    for said in run(drift_after_raising):
        assert 'parameter "weight"' in said


def fall_behind(what: str) -> tuple[float, list[str]]:
    """Rank 1's last batch raises: what it has not applied yet must not be lost in silence."""
    model, optimizer, sync = scalar(1)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for step in range(3):
            loss = model(2.0**step)
            try:
                (Raises.apply(loss) + 0 * model.other if step == 2 and dist.get_rank() == 1 else loss).backward()
            except ArithmeticError:
                continue
            step_and_zero(optimizer)
        if what == "drain":
            while sync.drain():
                step_and_zero(optimizer)
        elif what == "broadcast":
            sync.broadcast()
        elif what == "save":
            sync.load_state_dict(sync.state_dict())
            sync.broadcast()
        while what != "detach" and sync.drain():
            step_and_zero(optimizer)
        sync.detach()
    return model.weight.item(), [str(each.message) for each in heard if "do not hold yet" in str(each.message)]


def test_who_is_behind_is_told_or_catches_up(run: Callable[..., Any]) -> None:
    assert run(fall_behind, "drain") == run(fall_behind, "broadcast") == [(-3.0, [])] * 2
    (first, nothing), (second, [said]) = run(fall_behind, "detach")
    assert (first, second, nothing) == (-3.0, -1.0, [])
    assert said.startswith("[rank 1/2 ")
    assert said.endswith("call drain() before detach()")
    (first, nothing), (second, [said]) = run(fall_behind, "save")
    assert (first, second, nothing) == (-3.0, -3.0, [])
    assert said.endswith("save 1 or more batches later, or resume from another rank's weights")


def nonfinite(policy: Literal["skip", "raise"], resumes: bool) -> tuple[float, int, str]:
    model, optimizer, sync = scalar(2, guard=gs.Guard(nonfinite=policy))
    raised, dropped = "", 0
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        for step in range(6):
            try:
                bad = step == 2 and dist.get_rank() == 1
                model(float("nan") if bad else 2.0**step).backward()
            except gs.NonFinite as error:
                assert step == 4
                raised = str(error)
            if resumes and step == 3:
                sync.load_state_dict(sync.state_dict())
            dropped += sync.dropped
            step_and_zero(optimizer)
        while sync.drain():
            step_and_zero(optimizer)
    sync.detach()
    return model.weight.item(), dropped, raised


@pytest.mark.parametrize("resumes", [False, True])
def test_a_nan_is_dropped_on_every_rank_when_its_turn_comes(resumes: bool, run: Callable[..., Any]) -> None:
    applied = -float(1 + 2 + 8 + 16 + 32)
    assert run(nonfinite, "skip", resumes) == [(applied, 1, "")] * 2
    for weight, _, raised in run(nonfinite, "raise", resumes):
        assert weight == applied
        assert "NaN or Inf in the gradient of weight" in raised
        assert resumes or "rank 1 has" in raised


def unused() -> None:
    model, optimizer, sync = scalar(1)
    for step, there in enumerate([True, False, True, False]):
        model(1.0, 1.0 if there and dist.get_rank() == 1 else None).backward()
        assert (model.other.grad is not None) == (step > 0 and step % 2 == 1)
        step_and_zero(optimizer)
    assert sync.drain()
    assert model.other.grad is None
    sync.detach()
    assert model.other.item() == -1.0


def test_a_parameter_that_no_rank_used_gets_no_gradient(run: Callable[..., Any]) -> None:
    run(unused)


def touch_nothing() -> float:
    model, optimizer, sync = scalar(1)
    for step in range(4):
        if not (step == 1 and dist.get_rank() == 1):  # its loss does not depend on the model
            model(2.0**step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    while sync.drain():
        step_and_zero(optimizer)
    assert model.seen.item() == 1 + 2 + 4 + 8, "buffers are not rank 0's"
    sync.detach()
    return model.weight.item()


def test_a_rank_whose_loss_touched_nothing_keeps_in_step(run: Callable[..., Any]) -> None:
    assert run(touch_nothing) == [-(1 + 2 / 2 + 4 + 8)] * 2


def look_up(sparse: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Embedding(6, 2, sparse=sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.delayed(1)))
    for step in range(4):
        model(torch.tensor([step, dist.get_rank(), step])).square().sum().backward()
        step_and_zero(optimizer)
    sync.detach()
    return model.weight.detach()


def test_sparse_gradients_travel_as_dense_ones(run: Callable[..., Any]) -> None:
    assert torch.equal(run(look_up, True)[0], run(look_up, False)[1])


def drain_after_no_sync() -> float:
    model, optimizer, sync = scalar(1)
    for step in range(3):
        with sync.no_sync():
            model(2.0**step).backward()
        if step == 0:
            model(64.0).backward()
            step_and_zero(optimizer)
    while sync.drain():
        step_and_zero(optimizer)
    sync.detach()
    return model.weight.item()


def test_what_no_sync_gathered_is_not_lost_at_the_end(run: Callable[..., Any]) -> None:
    assert run(drain_after_no_sync) == [-(1 + 64 + 2 + 4)] * 2


def drain_unequally() -> None:
    model, _, sync = scalar(1)
    model(1.0).backward()
    if dist.get_rank() == 0:
        sync.drain()
    model(1.0).backward()
    with pytest.raises(gs.Disagreement, match="equally often"):
        sync.state_dict()


def test_ranks_that_drain_unequally_find_out(run: Callable[..., Any]) -> None:
    run(drain_unequally)


def change_k(before: int, after: int) -> float:
    model, optimizer, sync = scalar(before)
    for step in range(before):
        model(2.0**step).backward()
        step_and_zero(optimizer)
    state = sync.state_dict()
    sync.detach()
    model, optimizer, sync = scalar(after)
    sync.load_state_dict(state)
    for step in range(before, 7):
        model(2.0**step).backward()
        step_and_zero(optimizer)
    while sync.drain():
        step_and_zero(optimizer)
    sync.detach()
    return model.weight.item()


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)])
def test_with_another_k_nothing_that_waits_is_lost(before: int, after: int, run: Callable[..., Any]) -> None:
    assert run(change_k, before, after) == [-127.0] * 2


def load_of_another_pace() -> float:
    model = Scalar()
    sync = gs.attach(model, torch.optim.SGD(model.parameters(), lr=1.0), gs.Plan())
    state = sync.state_dict()
    sync.detach()
    model, optimizer, sync = scalar(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is of another pace
        sync.load_state_dict(state)
    assert not sync.mid_window, "nothing was begun"
    for step in range(4):
        model(2.0**step).backward()
        assert sync.mid_window == (step < 2)
        step_and_zero(optimizer)
    while sync.drain():
        step_and_zero(optimizer)
    sync.detach()
    return model.weight.item()


def test_a_state_of_another_pace_begins_as_attach_does(run: Callable[..., Any]) -> None:
    assert run(load_of_another_pace) == [-15.0] * 2


def detach_at_once() -> None:
    model, optimizer, sync = train(gs.Plan(pace=gs.delayed(2), compress=gs.int8()))
    for step in range(3):
        backward(model, step)
    before = [param.grad.clone() for param in model.parameters()]
    assert all(grad.any() for grad in before)
    sync.detach()
    assert all(torch.equal(param.grad, grad) for param, grad in zip(model.parameters(), before, strict=True))
    backward(model, 3)
    optimizer.step()


def test_detach_waits_for_what_is_under_way(run: Callable[..., Any]) -> None:
    run(detach_at_once)
