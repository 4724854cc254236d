"""Users' post-accumulate hooks, an optimizer in backward above all: they see the average, when it is there."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs
from models import Trapped
from yardstick import assert_replicas_equal

Arm = Literal["outside", "before", "after", "later", "torch before", "torch after"]
Run = Callable[..., list[Any]]
ARMS: list[Arm] = ["before", "after", "torch before", "torch after"]
LR = {"lr": 0.05, "momentum": 0.9}


class Net(nn.Module):
    """A tied weight, a frozen one, one that only even steps use, one that only rank 0 uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.odd, self.alone = nn.Linear(8, 40), nn.Linear(40, 40), nn.Linear(40, 40)
        self.last = nn.Linear(40, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        hidden = self.first(self.frozen(x)).tanh()
        hidden = hidden if step % 2 else self.odd(hidden).tanh()
        hidden = hidden if rank else self.alone(hidden)
        return self.first(self.last(hidden)).square().mean()


def data(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * dist.get_rank() + step))


def step_in_backward(model: nn.Module) -> None:
    """As PyTorch's tutorial has it."""
    for param in model.parameters():
        if param.requires_grad:
            optimizer = torch.optim.SGD([param], **LR)

            def hook(param: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            param.register_post_accumulate_grad_hook(hook)


def hang_torchs(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, by this package of torch's
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(torch.optim.SGD, [p for p in model.parameters() if p.requires_grad], LR)


HANGS: dict[Arm, Callable[[nn.Module], None]] = {
    "before": step_in_backward, "after": step_in_backward, "later": step_in_backward,
    "torch before": hang_torchs, "torch after": hang_torchs,
}  # fmt: skip


def train(arm: Arm, plan: gs.Plan, story: str = "", steps: int = 6) -> list[torch.Tensor]:
    """Parameters after every step. Where the hooks step, the optimizer that `attach` knows finds nothing."""
    model, rank = Net(), dist.get_rank()
    if arm in ("before", "torch before"):
        HANGS[arm](model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], **LR)
    guard = gs.Guard(timeout=30, nonfinite="skip" if story == "nan" else "allow")
    sync = gs.attach(model, optimizer, plan, guard=guard)
    if arm in ("after", "torch after"):
        HANGS[arm](model)
    states = []
    for step in range(steps):
        if story == "no_sync":
            with sync.no_sync():
                model(data(50 + step), step, rank).backward()
        factor = float("nan") if story == "nan" and step == 3 and rank else 1.0
        if story != "no loss" or step % 3 or not rank:
            (model(data(step), step, rank) * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        states += [param.detach().clone() for param in model.parameters()]
    while sync.drain():
        optimizer.step()
        optimizer.zero_grad()
    sync.detach()
    assert_replicas_equal(model)
    return states + list(model.parameters())


def check(arm: Arm, plan: gs.Plan, story: str = "") -> None:
    for theirs, ours in zip(train("outside", plan, story), train(arm, plan, story), strict=True):
        assert torch.equal(theirs, ours)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("arm", ARMS)
def test_an_optimizer_in_backward_applies_the_average(arm: Arm, ranks: int, run: Run) -> None:
    run(check, arm, gs.Plan(bucket_bytes=1024), ranks=ranks)


PLANS = {
    "default": gs.Plan(),
    "after backward": gs.Plan(overlap="none"),
    "sum": gs.Plan(combine="sum"),
    "int8": gs.Plan(compress=gs.int8(), bucket_bytes=1024),
    "accumulate": gs.Plan(pace=gs.accumulate(4)),
    "delayed": gs.Plan(pace=gs.delayed(1)),
    "local_sgd": gs.Plan(pace=gs.local_sgd(2)),
    "diloco": gs.Plan(pace=gs.diloco(3)),
}


@pytest.mark.parametrize("arm", ["after", "torch before"])
@pytest.mark.parametrize("plan", PLANS)
def test_so_it_does_under_every_plan(plan: str, arm: Arm, run: Run) -> None:
    run(check, arm, PLANS[plan])


@pytest.mark.parametrize("story", ["no_sync", "nan", "no loss"])
def test_and_not_what_is_local_dropped_or_somebody_elses(story: str, run: Run) -> None:
    for plan in (gs.Plan(bucket_bytes=1024), gs.Plan(pace=gs.accumulate(2))):
        run(check, "after", plan, story)


def one_alone(arm: Arm) -> list[torch.Tensor]:
    return train(arm, gs.Plan(pace=gs.accumulate(2)), steps=5)


def test_one_rank_alone_steps_at_the_windows_end_too(run: Run) -> None:
    (outside,), (after,) = run(one_alone, "outside", ranks=1), run(one_alone, "after", ranks=1)
    for theirs, ours in zip(outside, after, strict=True):
        assert torch.equal(theirs, ours)


def raises_once(arm: Arm, plan: str = "", steps: bool = True) -> list[torch.Tensor]:
    """A backward raises on one rank: no rank applies anything of that batch."""
    torch.manual_seed(0)
    model = Trapped()
    optimizer = torch.optim.SGD(model.parameters(), **LR)
    sync = gs.attach(model, optimizer, PLANS[plan] if plan else gs.Plan(bucket_bytes=1024))
    if arm == "after":
        step_in_backward(model)
    for step in range(4):
        model.armed = step == 2 and dist.get_rank() == 1
        with contextlib.suppress(ArithmeticError):
            model(data(step)).square().mean().backward()
        if steps:
            optimizer.step()
            optimizer.zero_grad()
    while sync.drain():
        optimizer.step()
    sync.detach()
    assert_replicas_equal(model)
    return list(model.parameters())


def check_raising(plan: str = "") -> None:
    with pytest.warns(UserWarning, match="backward"):
        trained = [raises_once("outside", plan), raises_once("after", plan), raises_once("after", plan, steps=False)]
    for a, b, c in zip(*trained, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_a_batch_whose_backward_raised_is_applied_by_nobody(run: Run) -> None:
    run(check_raising)


def test_under_delayed_a_hook_applies_the_average_that_was_due_once(run: Run) -> None:
    run(check_raising, "delayed")


def join_unevenly(arm: Arm) -> list[torch.Tensor]:
    model, rank = Net(), dist.get_rank()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], **LR)
    sync = gs.attach(model, optimizer)
    if arm == "after":
        step_in_backward(model)
    for epoch in range(2):
        with sync.join():
            for step in range(2 + 2 * rank):
                model(data(10 * epoch + step), step, rank).backward()
                optimizer.step()
                optimizer.zero_grad()
    sync.detach()
    assert_replicas_equal(model)
    return list(model.parameters())


def check_join() -> None:
    """Momentum is not among what join() levels: every rank has kept it by stepping along."""
    for theirs, ours in zip(join_unevenly("outside"), join_unevenly("after"), strict=True):
        assert torch.equal(theirs, ours)


def test_ranks_out_of_data_step_along(run: Run) -> None:
    run(check_join)


def watch_handles() -> None:
    """A hook that only reads sees the average; handles of before and after attach remove, whenever they are asked."""
    model, rank = nn.Linear(3, 2), dist.get_rank()
    seen: dict[str, list[torch.Tensor]] = {"early": [], "late": [], "both": []}

    def noting(name: str) -> Callable[[torch.Tensor], None]:
        def hook(param: torch.Tensor) -> None:
            assert param.grad is not None
            assert not torch.is_grad_enabled()
            seen[name].append(param.grad.clone())

        return hook

    def step() -> torch.Tensor:
        model.zero_grad()
        model(torch.full((1, 3), 1.0 + rank)).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad

    early = model.weight.register_post_accumulate_grad_hook(noting("early"))
    kept = model.weight.register_post_accumulate_grad_hook(noting("both"))
    sync = gs.attach(model)
    late = model.weight.register_post_accumulate_grad_hook(noting("late"))
    for _ in range(2):
        step()
    assert all(len(each) == 2 and torch.equal(each[1], torch.full((2, 3), 1.5)) for each in seen.values())
    early.remove()
    step()
    assert [len(each) for each in seen.values()] == [2, 3, 3]
    sync.detach()
    local = step()  # autograd's own time again
    assert [len(each) for each in seen.values()] == [2, 4, 4]
    assert torch.equal(seen["late"][-1], local)
    assert torch.equal(local, torch.full((2, 3), 1.0 + rank))
    late.remove()
    again = gs.attach(model)
    step()
    assert [len(each) for each in seen.values()] == [2, 4, 5]
    assert torch.equal(seen["both"][-1], torch.full((2, 3), 1.5))
    again.detach()
    kept.remove()
    step()
    assert [len(each) for each in seen.values()] == [2, 4, 5]
    copy.deepcopy(model)(torch.ones(1, 3)).sum().backward()


def test_handles_go_on_removing_and_detach_gives_the_hooks_back(run: Run) -> None:
    run(watch_handles)


def refuse() -> str:
    """First of a hook that is there, then of one that is registered."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = gs.Plan(pace=gs.async_sgd(max_staleness=1))
    handle = model.bias.register_post_accumulate_grad_hook(print)
    with pytest.raises(ValueError) as before:
        gs.attach(model, optimizer, plan)
    handle.remove()
    sync = gs.attach(model, optimizer, plan)
    with pytest.raises(ValueError) as after:
        model.bias.register_post_accumulate_grad_hook(print)
    assert str(before.value) == str(after.value)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    sync.detach()
    return str(after.value)


def test_async_sgd_refuses_a_hook_before_attach_and_where_it_is_registered(run: Run) -> None:
    assert run(refuse) == [
        "parameter bias has a post-accumulate hook, but async_sgd sends gradients to their owners in optimizer.step(), "
        "which an optimizer in such a hook would keep from them: remove it, or use another pace"
    ] * 2  # fmt: skip


def other_hooks(attached: bool) -> list[torch.Tensor]:
    """Tensor hooks, module hooks and multi-grad hooks run before a gradient is accumulated: on what is local."""
    torch.manual_seed(0)
    model, heard = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer) if attached else None
    wrapped: nn.Module = model if attached else nn.parallel.DistributedDataParallel(model)
    model[0].weight.register_hook(lambda grad: grad * 2)
    model[2].register_full_backward_hook(lambda module, got, gave: (got[0] * 0.5,))
    torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), heard.append)
    for step in range(3):
        wrapped(data(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(heard) == 3
    assert all(grad is not None for grad in heard[0])
    if sync is not None:
        sync.detach()
    return list(model.parameters())


def check_other_hooks() -> None:
    for theirs, ours in zip(other_hooks(False), other_hooks(True), strict=True):
        assert torch.equal(theirs, ours)


def test_hooks_of_other_kinds_do_what_they_do_under_ddp(run: Run) -> None:
    run(check_other_hooks)
