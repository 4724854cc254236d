"""Laws: replicas are equal to the bit, to DDP to the bit, to a second run, to a resumed run; detach undoes attach."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from raising import WIDTH, Line
from torch import nn

import gradsync as gs
from gradsync.transport.host_meeting import declare_host
from models import mlp
from yardstick import Context, Scenario, assert_replicas_equal, assert_same, history, plain_step


def check_thirty_steps() -> None:
    scenario = Scenario(mlp, plain_step)
    ours = history(scenario, "gradsync", steps=30)
    for state in ours:
        assert_replicas_equal(state)
    assert_same(ours, history(scenario, "gradsync", steps=30), exact=True)
    if dist.get_world_size() == 2:
        assert_same(ours, history(scenario, "ddp", steps=30), exact=True)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_replicas_and_runs_are_bitwise_equal_after_thirty_steps(ranks: int, run: Callable[..., Any]) -> None:
    run(check_thirty_steps, ranks=ranks)


def _train(ctx: Context, steps: range) -> None:
    for ctx.step in steps:
        ctx.generator.manual_seed(1000 * ctx.rank + ctx.step)
        plain_step(ctx)


def _fresh(plan: gs.Plan) -> Context:
    torch.manual_seed(3)
    model = mlp()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2)]
    sync = gs.attach(model, optimizers, plan)
    return Context("gradsync", model, model, optimizers, sync, dist.get_rank())


def check_resume(plan: gs.Plan, total: int, cut: int) -> None:
    whole = _fresh(plan)
    _train(whole, range(total))
    first = _fresh(plan)
    _train(first, range(cut))
    assert first.sync is not None
    saved = (first.model.state_dict(), first.opt.state_dict(), first.sync.state_dict())
    second = _fresh(plan)
    assert second.sync is not None
    second.model.load_state_dict(saved[0])
    second.opt.load_state_dict(saved[1])
    second.sync.load_state_dict(saved[2])
    _train(second, range(cut, total))
    for name, param in whole.model.named_parameters():
        assert torch.equal(param, dict(second.model.named_parameters())[name]), f"{name} differs after resuming"
    for ctx in (whole, first, second):
        assert ctx.sync is not None
        ctx.sync.detach()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("plan", "cut"), [(gs.Plan(bucket_bytes=1024), 4), (gs.Plan(pace=gs.accumulate(3), bucket_bytes=1024), 4)]
)
def test_saving_and_resuming_is_the_uninterrupted_run(
    ranks: int, plan: gs.Plan, cut: int, run: Callable[..., Any]
) -> None:
    run(check_resume, plan, 9, cut, ranks=ranks)


def check_state_survives_weights_only(path: str) -> None:
    ctx = _fresh(gs.Plan(pace=gs.accumulate(3)))
    _train(ctx, range(2))
    assert ctx.sync is not None
    file = f"{path}/{ctx.rank}.pt"
    torch.save(ctx.sync.state_dict(), file)
    ctx.sync.load_state_dict(torch.load(file, weights_only=True))
    ctx.sync.detach()


def test_state_can_be_saved_without_pickled_code(run: Callable[..., Any], tmp_path: Any) -> None:
    run(check_state_survives_weights_only, str(tmp_path))


def load_different_states() -> str:
    ctx = _fresh(gs.Plan())
    _train(ctx, range(2))
    assert ctx.sync is not None
    state = ctx.sync.state_dict()
    if ctx.rank == 1:
        state["gradsync.step"] = state["gradsync.rank1.step"] = torch.tensor(17)
    with pytest.raises(gs.Disagreement) as caught:
        ctx.sync.load_state_dict(state)
    ctx.sync.detach()
    return str(caught.value)


def test_states_of_different_steps_are_refused_alike(run: Callable[..., Any]) -> None:
    first, second = run(load_different_states)
    assert first == second
    assert "that of step 2, saved by 2 ranks, on rank 0; that of step 17, saved by 2 ranks, on rank 1" in first


def _traces_of(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {"keys": list(model.state_dict()), "type": type(model)}
    for name, module in model.named_modules():
        found[name] = (len(module._forward_hooks), len(module._forward_pre_hooks), sorted(vars(module)))
    for name, param in model.named_parameters():
        found[name] = (len(param._post_accumulate_grad_hooks or {}), len(param._backward_hooks or {}))
    return found


def check_detach() -> None:
    torch.manual_seed(0)
    model = mlp()
    before = _traces_of(model)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer)
    assert list(model.state_dict()) == before["keys"]
    sync.detach()
    sync.detach()
    assert _traces_of(model) == before
    assert not optimizer._optimizer_step_pre_hooks
    for name, param in model.named_parameters():
        assert torch.equal(param, values[name])
    # The model trains on alone, its gradients its own
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    again = gs.attach(model, optimizer)
    again.detach()


@pytest.mark.parametrize("ranks", [1, 2])
def test_attach_and_detach_leave_the_model_as_it_was(ranks: int, run: Callable[..., Any]) -> None:
    run(check_detach, ranks=ranks)


def check_nothing_is_kept() -> list[bool]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer)
    for _ in range(2):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
    sync.detach()
    held = [weakref.ref(sync), weakref.ref(next(model.parameters())), weakref.ref(sync._steps)]
    del model, optimizer, sync
    gc.collect()
    return [each() is None for each in held]


def test_a_detached_model_is_kept_by_nobody(run: Callable[..., Any]) -> None:
    assert run(check_nothing_is_kept) == [[True] * 3] * 2


def check_kept_gradients() -> None:
    model = mlp()
    sync = gs.attach(model)
    model(torch.full((2, 8), float(dist.get_rank()))).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    sync.detach()
    for name, param in model.named_parameters():
        assert param.grad is not None
        assert torch.equal(param.grad, grads[name])
        assert param.grad._base is None, "still a view of a bucket"


def test_gradients_outlive_detach(run: Callable[..., Any]) -> None:
    run(check_kept_gradients)


def check_one_rank_costs_nothing() -> None:
    model = mlp()
    before = _traces_of(model)
    sync = gs.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert _traces_of(model) == before, "hooks on a single rank"
    sync.set_batch_weight(3)
    with sync.join(), sync.no_sync():
        model(torch.randn(2, 8)).sum().backward()
    sync.drain()
    assert sync.stats()["steps"] == 0
    sync.detach()


def test_one_rank_works_and_has_no_hooks(run: Callable[..., Any]) -> None:
    run(check_one_rank_costs_nothing, ranks=1)


def _raise_and_detach(model: Line, sync: gs.GradSync) -> None:
    model.armed = "in the middle"
    try:
        model(torch.ones(WIDTH)).backward()
    finally:
        sync.detach()


def leave_by_an_error() -> str:
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    declare_host(f"h{rank}")  # a bucket under way waits in gloo, for the other rank
    try:
        model = Line()
        sync = gs.attach(model, plan=gs.Plan(bucket_bytes=1024))
    finally:
        declare_host(None)
    for _ in range(2):
        model(torch.ones(WIDTH)).backward()
    if rank == 1:
        with pytest.raises(ArithmeticError):
            _raise_and_detach(model, sync)
        store.set("left by an error", "1")
        return "gone"
    store.wait(["left by an error"], timedelta(seconds=20))
    with pytest.raises(gs.PeerLost) as caught:
        model(torch.ones(WIDTH)).backward()
    sync.detach()
    return str(caught.value)


def test_who_detaches_because_of_an_error_waits_for_nobody(run: Callable[..., Any]) -> None:
    said, _ = run(leave_by_an_error)
    assert "rank 1 failed in step 2" in said
