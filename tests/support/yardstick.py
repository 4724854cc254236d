"""The yardstick: the same training three ways, by hand, by DistributedDataParallel and by gradsync.

A `Scenario` says how to build a model and what one step does; `history` runs it and returns every parameter
after every step. The scenario calls `ctx.synced()` after each backward: by hand, that is where gradients
are averaged; for the other two it does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs

Kind = Literal["by hand", "ddp", "gradsync"]


@dataclass
class Context:
    """What a step may use."""

    kind: Kind
    model: nn.Module
    forward: Callable[..., Any]
    optimizers: list[torch.optim.Optimizer]
    sync: gs.GradSync | None
    rank: int
    step: int = 0
    generator: torch.Generator = field(default_factory=torch.Generator)

    @property
    def opt(self) -> torch.optim.Optimizer:
        return self.optimizers[0]

    def batch(self, *shape: int) -> torch.Tensor:
        """Fresh data, different on every rank, the same for every kind."""
        return torch.randn(*shape, generator=self.generator)

    def synced(self) -> None:
        """A backward has ended that synchronizes."""
        if self.kind == "by hand":
            average_by_hand(self.model)


@dataclass(frozen=True)
class Scenario:
    """How to build, and what a step does."""

    build: Callable[[], nn.Module]
    step: Callable[[Context], None]
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]] = lambda model: [
        torch.optim.AdamW(model.parameters(), lr=1e-2)
    ]
    plan: gs.Plan = field(default_factory=lambda: gs.Plan(bucket_bytes=1024))
    ddp: dict[str, Any] | None = field(default_factory=dict)  # None: DDP cannot do this
    wrap: Callable[[nn.Module], Any] = lambda model: model


def plain_step(ctx: Context) -> None:
    ctx.forward(ctx.batch(6, 8)).square().mean().backward()
    ctx.synced()
    ctx.opt.step()
    ctx.opt.zero_grad()


def average_by_hand(model: nn.Module) -> None:
    """One all-reduce per parameter; a rank without a gradient brings zeros if another has one."""
    size = dist.get_world_size()
    for param in model.parameters():
        has = torch.tensor([param.grad is not None], dtype=torch.int64)
        dist.all_reduce(has)
        if has.item():
            grad = torch.zeros_like(param) if param.grad is None else param.grad.to_dense() * (1.0 / size)
            dist.all_reduce(grad)
            param.grad = grad


def history(scenario: Scenario, kind: Kind, steps: int = 5) -> list[dict[str, torch.Tensor]]:
    """Every parameter and every gradient after every step."""
    torch.manual_seed(7)
    model = scenario.build()
    optimizers = scenario.optimizers(model)
    rank = dist.get_rank()
    forward = scenario.wrap(model)
    sync = None
    if kind == "ddp":
        forward = DistributedDataParallel(model, **(scenario.ddp or {}))
    elif kind == "gradsync":
        sync = gs.attach(model, optimizers, scenario.plan)
    ctx = Context(kind, model, forward, optimizers, sync, rank)
    ctx.generator.manual_seed(100 + rank)
    states = []
    for ctx.step in range(steps):
        scenario.step(ctx)
        states.append({name: p.detach().clone() for name, p in model.named_parameters()})
    if sync is not None:
        sync.detach()
    return states


def fingerprint(states: list[dict[str, torch.Tensor]]) -> list[dict[str, list[float]]]:
    """Small and exact: what ranks send back to the test."""
    return [{name: _summary(value) for name, value in state.items()} for state in states]


def assert_same(ours: list[dict[str, torch.Tensor]], theirs: list[dict[str, torch.Tensor]], exact: bool) -> None:
    """Equal to the bit, or up to the order of additions."""
    assert len(ours) == len(theirs)
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for name in b:
            if exact:
                assert torch.equal(a[name], b[name]), (
                    f"step {step}: {name} differs by {(a[name] - b[name]).abs().max()}"
                )
            else:
                torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5, msg=f"step {step}: {name}")


def assert_replicas_equal(model_or_states: nn.Module | dict[str, torch.Tensor]) -> None:
    """Every rank holds the same bits as rank 0."""
    tensors = dict(model_or_states.named_parameters()) if isinstance(model_or_states, nn.Module) else model_or_states
    for name, tensor in tensors.items():
        mine = tensor.detach().clone()
        theirs = mine.clone()
        dist.broadcast(theirs, 0)
        assert torch.equal(mine, theirs), f"{name} differs between rank 0 and rank {dist.get_rank()}"


def _summary(value: torch.Tensor) -> list[float]:
    flat = value.double().flatten()
    return [flat.sum().item(), flat.norm().item(), *flat[:3].tolist()]
