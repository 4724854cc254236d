"""When buckets leave, what is recorded of it, and what is said when nothing can overlap."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradsync as gs
from models import Checkpointed, mlp
from yardstick import assert_replicas_equal


class Wide(nn.Module):
    """Enough work in backward that its end is far from its beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(384, 384) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def hear_of_late_hooks(how: str) -> list[str]:
    torch.manual_seed(0)
    model: Any = Wide()
    if how == "whole":
        model = torch.compile(model, backend="aot_eager")
    elif how == "blocks":
        for block in model.layers:
            block.compile(backend="aot_eager")
    sync = gs.attach(model, None, gs.Plan(bucket_bytes=1 << 20))
    order = bytes(sync.state_dict()["gradsync.order"].tolist()).decode()
    assert order.startswith('["layers.'), "names carry no compiler's prefix"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(8):
            model(torch.randn(1024, 384) + dist.get_rank()).square().mean().backward()
            model.zero_grad()
    sync.detach()
    return [str(each.message) for each in caught if "compile" in str(each.message)]


def test_a_whole_compiled_model_is_told_once_that_nothing_overlaps(run: Callable[..., Any]) -> None:
    for messages in run(hear_of_late_hooks, "whole"):
        assert len(messages) == 1
        assert "compile its blocks instead" in messages[0]


@pytest.mark.parametrize("how", ["eager", "blocks"])
def test_otherwise_nothing_is_said(how: str, run: Callable[..., Any]) -> None:
    assert run(hear_of_late_hooks, how) == [[], []]


def launched_early(overlap: str) -> tuple[list[int], int]:
    """Which buckets had left when the first layer's gradient came, the last of all."""
    torch.manual_seed(0)
    model = mlp()
    sync = gs.attach(model, None, gs.Plan(bucket_bytes=1024, overlap=overlap))
    gone: list[int] = []
    model[0].weight.register_hook(lambda grad: gone.append(sync._synchronization._next))
    for _ in range(3):
        model(torch.randn(4, 8) + dist.get_rank()).sum().backward()
    sync.detach()
    return gone, len(sync._synchronization.bucket_order.buckets)


def test_buckets_leave_while_backward_computes(run: Callable[..., Any]) -> None:
    for gone, buckets in run(launched_early, "backward"):
        assert gone[0] == 0, "the first synchronization leaves at its end"
        assert gone[1:] == [buckets - 1] * 2
    for gone, _ in run(launched_early, "none"):
        assert gone == [0, 0, 0]


class Uneven(nn.Module):
    """From the second step on, its first-used layer comes last in backward on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor, backwards: bool) -> torch.Tensor:
        for layer in list(self.layers)[:: -1 if backwards else 1]:
            x = torch.tanh(layer(x))
        return x


def hold_up() -> dict[str, Any]:
    model = Uneven()
    sync = gs.attach(model, None, gs.Plan(bucket_bytes=1024))
    for step in range(4):
        model(torch.randn(4, 16) + dist.get_rank(), dist.get_rank() == 1 and step > 0).sum().backward()
    assert_replicas_equal({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    stats = sync.stats()
    sync.detach()
    return stats


def test_stats_name_the_parameter_that_held_up_the_order(run: Callable[..., Any]) -> None:
    first, second = run(hold_up)
    assert first["held_up_by"] is None
    assert second["held_up_by"] in ("layers.3.weight", "layers.3.bias")
    assert second["held_up_steps"] == 3


def cost_of_steps() -> dict[str, Any]:
    model = mlp()
    sync = gs.attach(model, None, gs.Plan(bucket_bytes=1024))
    for _ in range(5):
        model(torch.randn(4, 8) + dist.get_rank()).sum().backward()
    stats = sync.stats()
    stats["expected"] = sum(p.numel() * p.element_size() for p in model.parameters())
    sync.detach()
    return stats


def test_stats_say_what_synchronization_cost(run: Callable[..., Any]) -> None:
    for stats in run(cost_of_steps):
        assert stats["steps"] == 5
        assert stats["expected"] <= stats["nbytes"] <= stats["expected"] + 64 * 6
        assert stats["num_buckets"] == 2
        assert (stats["algorithm"], stats["sent_nbytes"]) == ("shared_memory", 0)
        assert 0 < stats["exposed_s"] <= stats["step_s"]
        assert stats["compute_s"] == pytest.approx(stats["step_s"] - stats["exposed_s"], abs=stats["step_s"])
        assert 0 < stats["comm_s"] <= stats["step_s"]


def late_gradient() -> tuple[list[str], list[bool]]:
    """Reentrant checkpointing with a shared weight only from the second step on: too late for the first bucket."""
    torch.manual_seed(0)
    model = Checkpointed(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer, gs.Plan(bucket_bytes=64 * 1024))
    errors, applied = [], []
    for step in range(5):
        model.reentrant = step > 0
        before = model.inner.weight.detach().clone()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                model(torch.randn(4, 8) + dist.get_rank()).square().mean().backward()
                optimizer.step()
            except gs.BackwardAborted as error:
                errors.append(str(error))
            optimizer.zero_grad()
        applied.append(not torch.equal(before, model.inner.weight))
    assert_replicas_equal(model)
    sync.detach()
    return errors, applied


def test_a_gradient_that_comes_too_late_is_named_once_and_waited_for_from_then_on(run: Callable[..., Any]) -> None:
    for errors, applied in run(late_gradient):
        assert applied[0]
        assert all(applied[2:])
        assert len(errors) <= 1
        assert all("shared" in error for error in errors)


def checkpoint_whole_model() -> None:
    """The root forward runs inside backward, once per call; each recomputation synchronizes for itself."""
    torch.manual_seed(0)
    model = mlp()
    reference = mlp()
    reference.load_state_dict(model.state_dict())
    sync = gs.attach(model)
    for step in range(3):
        xs = [
            torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + i + 100 * dist.get_rank()))
            for i in (1, 2)
        ]
        outs = [checkpoint(model, x.requires_grad_(), use_reentrant=True) for x in xs]
        sum(out.square().mean() for out in outs).backward()
        sum(reference(x.detach()).square().mean() for x in xs).backward()
        for ours, local in zip(model.parameters(), reference.parameters(), strict=True):
            assert local.grad is not None
            dist.all_reduce(local.grad)
            torch.testing.assert_close(ours.grad, local.grad / dist.get_world_size())
        model.zero_grad()
        reference.zero_grad()
    sync.detach()


def test_a_model_checkpointed_as_a_whole_is_averaged(run: Callable[..., Any]) -> None:
    run(checkpoint_whole_model)


def call_parts_only() -> None:
    """The root's forward is never called: the fallback begins each backward."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer, gs.Plan(bucket_bytes=1024))
    for _ in range(4):
        x = torch.randn(4, 8) + dist.get_rank()
        for layer in model:
            x = layer(x)
        x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sync.stats()["steps"] == 4
    assert_replicas_equal(model)
    sync.detach()


def test_a_model_whose_parts_are_called_is_averaged(run: Callable[..., Any]) -> None:
    run(call_parts_only)


class Turned(nn.Module):
    """Three layers, called in the order in which they were registered or in the other one."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(96, 96, bias=False) for _ in range(3)])
        self.turned = turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers) if self.turned else self.layers:
            x = layer(x)
        return x


def first_places(turned: bool) -> bool:
    """Whether the first step's memory is that of the later ones."""
    model = Turned(turned)
    sync = gs.attach(model, None, gs.Plan(bucket_bytes=1024))
    buckets = list(sync._synchronization.bucket_order.buckets)
    model(torch.randn(4, 96)).square().mean().backward()
    stays = buckets == list(sync._synchronization.bucket_order.buckets)
    sync.detach()
    return stays


@pytest.mark.parametrize("turned", [False, True])
def test_memory_is_taken_anew_only_where_gradients_arrive_in_another_order(
    turned: bool, run: Callable[..., Any]
) -> None:
    assert run(first_places, turned) == [not turned] * 2
