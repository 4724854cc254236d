"""What users do to models, optimizers and loops around gradsync, and what a stranger broke; each with its story."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import gradsync as gs
from models import Trapped, mlp
from yardstick import assert_replicas_equal


def _data(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * dist.get_rank() + step))


def closures(kind: str, plan: gs.Plan, weighted: bool) -> list[torch.Tensor]:
    """`optimizer.step(closure)`: backward runs inside of step (LBFGS, Lightning)."""
    torch.manual_seed(0)
    model = mlp()
    if kind == "lbfgs":
        optimizer: torch.optim.Optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer, plan)
    for step in range(4):
        if weighted:
            sync.set_batch_weight(1 + 2 * dist.get_rank())

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(_data(step)).square().mean()
            loss.backward()
            return loss

        if kind == "plain":
            closure()
            optimizer.step()
        else:
            optimizer.step(closure)
    assert_replicas_equal(model)
    sync.detach()
    return [p.detach().clone() for p in model.parameters()]


def check_closures(weighted: bool) -> None:
    plan = gs.Plan(bucket_bytes=1024)
    for ours, plain in zip(closures("sgd", plan, weighted), closures("plain", plan, weighted), strict=True):
        assert torch.equal(ours, plain)
    closures("lbfgs", plan, weighted=False)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_step_with_a_closure_is_the_same_step(weighted: bool, run: Callable[..., Any]) -> None:
    run(check_closures, weighted)


def drain_after_abort() -> bool:
    """A backward inside a window raised, was caught, and the window is drained."""
    torch.manual_seed(0)
    model = Trapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.accumulate(4), bucket_bytes=1024))
    before = model.first.weight.detach().clone()
    for step in range(2):
        model.armed = step == 1 and dist.get_rank() == 1
        with contextlib.suppress(ArithmeticError):
            model(_data(step)).square().mean().backward()
    sync.drain()
    optimizer.step()
    assert_replicas_equal(model)
    dropped = sync.dropped
    assert torch.equal(before, model.first.weight)
    sync.detach()
    return dropped


def test_draining_a_window_in_which_a_backward_raised_drops_it(run: Callable[..., Any]) -> None:
    assert run(drain_after_abort) == [True, True]


def zero_weight() -> None:
    """A rank without tokens: its loss is 0/0, and it says so."""
    model = nn.Sequential(nn.Linear(1, 300, bias=False), nn.Linear(300, 1, bias=False))
    for param in model.parameters():
        nn.init.constant_(param, 0.5)  # so each gradient is 0.5, too
    sync = gs.attach(model, None, gs.Plan(bucket_bytes=1024))
    for _ in range(2):
        empty = dist.get_rank() == 1
        sync.set_batch_weight(0 if empty else 5)
        (model(torch.ones(1, 1)).sum() * (float("nan") if empty else 1.0)).backward()
        assert [param.grad.unique().tolist() for param in model.parameters()] == [[0.5], [0.5]]
        model.zero_grad()
    sync.detach()


def test_a_rank_with_weight_zero_does_not_spread_its_nan(run: Callable[..., Any]) -> None:
    run(zero_weight)


class Masked(nn.Module):
    """A buffer that autograd saves for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mask", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.mask


def save_buffers() -> None:
    """Two backwards through one graph: each is averaged (DDP would leave the second one local)."""
    torch.manual_seed(0)
    model = Masked()
    reference = copy.deepcopy(model)
    sync = gs.attach(model)
    loss = model(_data(0)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    sync.detach()
    reference(_data(0)).square().mean().backward()
    for ours, local in zip(model.parameters(), reference.parameters(), strict=True):
        assert local.grad is not None
        torch.testing.assert_close(ours.grad, 2 * gs.all_reduce(local.grad))


def test_buffers_that_a_later_backward_needs_are_not_modified_under_it(run: Callable[..., Any]) -> None:
    run(save_buffers)


def copy_model() -> None:
    """EMA, SWA and torch.save(model): the copy is a plain model."""
    torch.manual_seed(0)
    model = mlp()
    sync = gs.attach(model)
    model(_data(0)).sum().backward()
    twin = copy.deepcopy(model)
    if dist.get_rank() == 0:
        twin(_data(1)).sum().backward()  # alone: nobody is asked to take part
    file = io.BytesIO()
    torch.save(model, file)
    torch.optim.swa_utils.AveragedModel(model).update_parameters(model)
    model(_data(2)).sum().backward()
    assert sync.stats()["steps"] == 2
    sync.detach()


def test_a_copy_of_an_attached_model_is_not_attached(run: Callable[..., Any]) -> None:
    run(copy_model)


def change(how: str) -> str:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer)
    model(_data(0)).sum().backward()
    optimizer.step()
    if how == "a module replaced":
        model[2] = nn.Linear(32, 32)
    elif how == "a parameter added":
        model[2].register_parameter("extra", nn.Parameter(torch.ones(1)))
    elif how == "converted":
        model.double()
    elif how == "a group added":
        extra = nn.Parameter(torch.ones(1))
        optimizer.add_param_group({"params": [extra]})
        extra.grad = torch.ones(1)
    with pytest.raises(gs.GradSyncError) as caught:
        optimizer.step() if how == "a group added" else model(_data(1))
    sync.detach()
    return str(caught.value)


def find_words(change: Callable[[nn.Module], Any]) -> str:
    """What the next forward says; where nothing is wrong, the weights are equal after two steps more."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer)
    model(_data(0)).sum().backward()
    optimizer.step()
    change(model)
    told = ""
    try:
        for step in (1, 2):
            model(_data(step)).sum().backward()
            optimizer.step()
        assert_replicas_equal(model)
    except gs.GradSyncError as error:
        told = str(error)
    sync.detach()
    return told


class LowRank(nn.Module):
    """As adapters are put in: the linear inside stays the same object."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.down, self.up = inner, nn.Linear(32, 2), nn.Linear(2, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) + self.up(self.down(x))
        return out


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


def pruned(model: nn.Module) -> None:
    prune.l1_unstructured(model[2], "weight", 0.3)


def parametrized(model: nn.Module) -> None:
    parametrize.register_parametrization(model[2], "weight", nn.Tanh())


def normed(model: nn.Module) -> None:
    parametrizations.weight_norm(model[2])


def adapted(model: nn.Module) -> None:
    model[2] = LowRank(model[2])


def wrapped(model: nn.Module) -> None:
    model[2] = Wrapper(model[2])


def grown(model: nn.Module) -> None:
    model[2].add_module("extra", nn.Linear(2, 2))


def shrunk(model: nn.Module) -> None:
    model[4] = nn.Identity()


RENAMED = (
    "as pruning, parametrizations and wrappers rename: checkpoints would not find it, and buffers that came with it "
    "would not be kept equal"
)
WORDS = {
    pruned: f"parameter 2.weight is called 2.weight_orig since attach, {RENAMED}",
    parametrized: f"parameter 2.weight is called 2.parametrizations.weight.original since attach, {RENAMED}",
    wrapped: f"parameter 2.weight is called 2.inner.weight since attach, {RENAMED}",
    adapted: "parameters 2.down.weight, 2.down.bias, 2.up.weight and 1 more were added after attach, and nobody "
    "averages what came later",
    grown: "parameters 2.extra.weight, 2.extra.bias were added after attach, and nobody averages what came later",
    shrunk: "parameters 4.weight, 4.bias were taken out of the model after attach",
}


@pytest.mark.parametrize("change", WORDS, ids=lambda change: change.__name__)
def test_what_changed_is_told_as_it_is(change: Callable[[nn.Module], Any], run: Callable[..., Any]) -> None:
    for rank, message in enumerate(run(find_words, change)):
        assert message == (
            f"[rank {rank}/2 step 1] {WORDS[change]}; call sync.detach() before you change the model, and attach again "
            "after"
        )


def test_a_weight_norm_replaces_what_it_norms(run: Callable[..., Any]) -> None:
    for message in run(find_words, normed):
        assert "parameter 2.weight was replaced after attach by 2.parametrizations.weight.original0" in message


def silent(model: nn.Module) -> None:
    """A cache that some layer makes when it is first called."""
    model[2].add_module("cache", nn.Identity())


def test_modules_without_parameters_may_come_later(run: Callable[..., Any]) -> None:
    assert run(find_words, silent) == ["", ""]


class Statistic(nn.Module):
    """Makes its buffer when it sees the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("seen", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.seen is None:
            self.seen = x.detach().mean(0)
        return self.layer(x)


def registered_late(model: nn.Module) -> None:
    model.register_buffer("late", torch.full((2,), float(dist.get_rank())))


def counted_late(model: nn.Module) -> None:
    """As a normalization put into a running model."""
    model.add_module("counter", nn.BatchNorm1d(4, affine=False))


def find_late_buffers(change: Callable[[nn.Module], Any] | None, buffers: Any) -> list[str]:
    torch.manual_seed(0)
    model = mlp() if change is not None else Statistic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer, buffers=buffers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            if step == 1 and change is not None:
                change(model)
            model(_data(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_replicas_equal(model)
    sync.detach()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (registered_late, "buffer late was"),
        (None, "buffer seen was"),
        (counted_late, "buffers counter.num_batches_tracked, counter.running_mean, counter.running_var were"),
    ],
)
def test_a_buffer_that_came_after_attach_is_told_once(change: Any, names: str, run: Callable[..., Any]) -> None:
    for told in run(find_late_buffers, change, "broadcast"):
        assert len(told) == 1
        assert f"{names} added after attach: each rank keeps its own" in told[0]
    assert run(find_late_buffers, change, "none") == [[], []]


def assign_gradients(pace: gs.Plan, detaches: bool) -> str:
    """As after `torch.autograd.grad(..., create_graph=True)`, and then `step()` without a backward."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer, pace)
    told = ""
    try:
        for step in range(2):
            params = list(model.parameters())
            grads = torch.autograd.grad(model(_data(step)).square().sum(), params, create_graph=True)
            for param, grad in zip(params, grads, strict=True):
                param.grad = gs.all_reduce(grad.detach()) if detaches else grad
            optimizer.step()
            optimizer.zero_grad()
        assert_replicas_equal(model)
    except gs.GradSyncError as error:
        told = str(error)
    sync.detach()
    return told


@pytest.mark.parametrize("plan", [gs.Plan(), gs.Plan(pace=gs.accumulate(2))])
def test_a_gradient_assigned_with_its_graph_is_refused_by_name(plan: gs.Plan, run: Callable[..., Any]) -> None:
    for rank, message in enumerate(run(assign_gradients, plan, False)):
        assert message == (
            f"[rank {rank}/2 step 0] the .grad of parameter 0.weight was assigned, with its graph, and no backward has "
            "brought it, so nobody averages it: call backward() on the loss, or average each yourself, "
            "param.grad = gs.all_reduce(grad.detach())"
        )


def test_an_average_may_be_assigned(run: Callable[..., Any]) -> None:
    assert run(assign_gradients, gs.Plan(), True) == ["", ""]


@pytest.mark.parametrize("how", ["a module replaced", "a parameter added", "converted", "a group added"])
def test_what_would_not_be_averaged_is_noticed(how: str, run: Callable[..., Any]) -> None:
    for message in run(change, how):
        assert "attach again" in message


def thaw_parts() -> str:
    """Parts called one by one, one of them thawed: nobody listened when its gradient came."""
    parts = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    parts["b"].requires_grad_(False)
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.1)
    sync = gs.attach(parts, optimizer)
    parts["a"](_data(0)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    parts["b"].requires_grad_(True)
    parts["b"](_data(1)).sum().backward()
    with pytest.raises(gs.GradSyncError) as caught:
        optimizer.step()
    sync.detach()
    return str(caught.value)


def test_a_thawed_part_that_is_called_alone_is_noticed(run: Callable[..., Any]) -> None:
    for message in run(thaw_parts):
        assert "b.weight was thawed" in message


def functional() -> None:
    """Fast weights in place of the parameters, for one call."""
    torch.manual_seed(0)
    model = mlp()
    sync = gs.attach(model)
    fast = {name: p * 1.5 for name, p in model.named_parameters()}
    torch.func.functional_call(model, fast, (_data(0),)).sum().backward()
    assert_replicas_equal({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    sync.detach()


def test_functional_calls_with_other_weights_are_averaged(run: Callable[..., Any]) -> None:
    run(functional)


def create_graph() -> str:
    model = mlp()
    sync = gs.attach(model)
    with pytest.raises(gs.BackwardAborted) as caught:
        model(_data(0)).sum().backward(create_graph=True)
    model.zero_grad()
    model(_data(1)).sum().backward()
    assert_replicas_equal({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    sync.detach()
    return str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_a_differentiable_average_is_refused_with_the_way_out(run: Callable[..., Any]) -> None:
    for message in run(create_graph):
        assert "torch.autograd.grad" in message


def reentrant_parts(plan: gs.Plan, weight: float | None) -> str:
    parts = mlp()
    sync = gs.attach(parts, [torch.optim.SGD(parts.parameters(), lr=0.1)], plan)
    if weight is not None:
        sync.set_batch_weight(weight)
    x = _data(0).requires_grad_()
    for part in parts:
        x = checkpoint(part, x, use_reentrant=True)
    try:
        x.sum().backward()
    except gs.BackwardAborted as error:
        return str(error)
    finally:
        sync.detach()
    assert_replicas_equal({name: p.grad for name, p in parts.named_parameters() if p.grad is not None})
    return ""


def test_reentrant_parts_are_averaged_or_refused_but_never_miscounted(run: Callable[..., Any]) -> None:
    assert run(reentrant_parts, gs.Plan(), None) == ["", ""]
    for plan, weight in (
        (gs.Plan(), 2.0),
        (gs.Plan(pace=gs.accumulate(2)), None),
        (gs.Plan(pace=gs.local_sgd(1)), None),
    ):
        for message in run(reentrant_parts, plan, weight):
            assert "use_reentrant=False" in message


def wrong_uses() -> list[str]:
    model = mlp()
    sync = gs.attach(model)
    errors = []
    for call in (lambda: sync.broadcast(7), lambda: sync.broadcast("0"), lambda: sync.broadcast(-1)):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="source must be a rank"):
            call()
    with pytest.raises(gs.Disagreement) as caught:
        sync.broadcast(dist.get_rank())
    errors.append(str(caught.value))
    sync.set_batch_weight(torch.tensor(3))  # type: ignore[arg-type]
    for weight in (True, "x", 1e300, 10**400, None):
        with pytest.raises(ValueError, match="batch weight"):
            sync.set_batch_weight(weight)  # type: ignore[arg-type]
    sync.detach()
    for use in (sync.broadcast, sync.drain, lambda: sync.set_batch_weight(1), lambda: sync.load_state_dict({})):
        with pytest.raises(gs.GradSyncError, match="detached"):
            use()
    return errors


def test_wrong_uses_are_sentences(run: Callable[..., Any]) -> None:
    for errors in run(wrong_uses):
        assert "different sources: [0, 1]" in errors[0]


def sum_and_autograd_grad() -> list[float]:
    """A sum that stands survives torch.autograd.grad, and is not summed again by a rank that touched nothing."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sync = gs.attach(model, optimizer, gs.Plan(combine="sum"))
    model(torch.ones(1, 1)).sum().backward()
    x = torch.ones(1, 1, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)
    assert model.weight.grad is not None
    values = [model.weight.grad.item()]
    optimizer.step()
    (model(x).sum() if dist.get_rank() == 0 else x.sum()).backward()
    optimizer.step()
    values.append(model.weight.grad.item())
    sync.detach()
    return values


def test_a_standing_sum_survives_what_is_no_backward(run: Callable[..., Any]) -> None:
    assert run(sum_and_autograd_grad) == [[2.0, 3.0]] * 2


def raise_and_continue() -> None:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer, guard=gs.Guard(nonfinite="raise"))
    raised = 0
    for step in range(4):
        factor = float("nan") if step == 2 and dist.get_rank() == 0 else 1.0
        try:
            (model(_data(step)).square().mean() * factor).backward()
            optimizer.step()
        except gs.NonFinite:
            raised += 1
        optimizer.zero_grad()
    assert raised == 1
    assert_replicas_equal(model)
    sync.detach()


def test_training_can_go_on_after_a_nan_was_raised(run: Callable[..., Any]) -> None:
    run(raise_and_continue)
    run(raise_and_continue, ranks=1)


def attach_alone() -> str:
    model = mlp()
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(gs.SyncTimeout) as caught:
        gs.attach(model, guard=gs.Guard(timeout=1))
    assert caught.value.ranks == (1,)
    return str(caught.value)


def attach_later() -> None:
    attach_alone()
    dist.barrier()
    sync = gs.attach(mlp())
    sync.detach()


def test_a_rank_that_does_not_attach_is_named_within_the_bound_and_may_come_later(run: Callable[..., Any]) -> None:
    assert "rank 1 did not come" in run(attach_alone)[0]
    run(attach_later)
