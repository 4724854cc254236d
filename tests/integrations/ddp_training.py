"""The same short training under stock DDP, under DDP with our hook, and attached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs
from gradsync.integrations.ddp_state import DDPState

STEPS = 6
Weights = dict[str, torch.Tensor]

COMPRESSORS = {
    "fp16": gs.fp16(),
    "bf16": gs.bf16(),
    "bf16 with feedback": gs.error_feedback(gs.bf16()),
    "int8": gs.int8(),
    "stochastic": gs.int8(rounding="stochastic"),
    "int4": gs.int4(),
    "sign": gs.sign(),
    "topk": gs.topk(0.05),
    "randomk": gs.randomk(0.05),
    "powersgd": gs.powersgd(2),
    "across_hosts": gs.across_hosts(gs.int8()),
    "by_parameter": gs.by_parameter({"*.bias": None, "0.*": gs.int4(), "*": gs.powersgd(2)}),
}


def mlp() -> nn.Module:
    """Odd sizes, weights and biases."""
    return nn.Sequential(nn.Linear(9, 65), nn.Tanh(), nn.Linear(65, 67), nn.Tanh(), nn.Linear(67, 3))


class Convolution(nn.Module):
    """A weight whose rows do not lie one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 16, 3), nn.Linear(16, 4)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))


class Branches(nn.Module):
    """Every rank uses another branch."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branches = nn.Linear(9, 20), nn.ModuleList(nn.Linear(20, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branches[dist.get_rank() % 2](torch.tanh(self.trunk(x)))


def batches(*shape: int) -> Callable[[], torch.Tensor]:
    """Fresh data, different on every rank, the same in every training."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return lambda: torch.randn(*shape, generator=generator)


def wrap(model: nn.Module, plan: gs.Plan | None, **options: Any) -> tuple[DistributedDataParallel, DDPState | None]:
    """Under DDP in several buckets, with our hook if there is a plan."""
    ddp = DistributedDataParallel(model, **({"bucket_cap_mb": 0.008} | options))
    if plan is None:
        return ddp, None
    state, hook = gs.ddp_hook(plan, ddp)
    ddp.register_comm_hook(state, hook)
    return ddp, state


def loss_of(forward: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return (forward(x) - x.flatten(1)[:, :1]).square().mean()


def train(
    plan: gs.Plan | None, build: Callable[[], nn.Module] = mlp, shape: tuple[int, ...] = (16, 9), **options: Any
) -> tuple[Weights, list[float]]:
    """Under DDP; as `fit`."""
    torch.manual_seed(7)
    model = build()
    ddp, state = wrap(model, plan, **options)
    found = fit(model, ddp, shape)
    if state is not None:
        assert state.stats()["steps"] == STEPS
        state.close()
    return found


def train_attached(
    plan: gs.Plan, build: Callable[[], nn.Module] = mlp, shape: tuple[int, ...] = (16, 9)
) -> tuple[Weights, list[float]]:
    torch.manual_seed(7)
    model = build()
    sync = gs.attach(model, plan=plan)
    found = fit(model, model, shape)
    sync.detach()
    return found


def fit(model: nn.Module, forward: Callable[..., torch.Tensor], shape: tuple[int, ...]) -> tuple[Weights, list[float]]:
    """The weights at the end; and the loss on data that nobody trains on, before and after."""
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), batches(*shape)
    losses = [_held_out(model, shape)]
    for _ in range(STEPS):
        loss_of(forward, batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    losses.append(_held_out(model, shape))
    return {name: param.detach().clone() for name, param in model.named_parameters()}, losses


@torch.no_grad()
def _held_out(model: nn.Module, shape: tuple[int, ...]) -> float:
    x = torch.randn(256, *shape[1:], generator=torch.Generator().manual_seed(3))
    return loss_of(model, x.to(next(model.parameters()).device)).item()


def assert_equal(ours: Weights, theirs: Weights) -> None:
    for name in theirs:
        difference = f"{name} differs by {(ours[name].double() - theirs[name].double()).abs().max()}"
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0, equal_nan=True, msg=difference)


def assert_close(ours: Weights, theirs: Weights) -> None:
    for name in theirs:
        torch.testing.assert_close(
            ours[name], theirs[name], rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


def assert_replicas_equal(weights: Weights) -> None:
    """Every rank holds the same bits as rank 0."""
    for name, mine in weights.items():
        first = mine.clone()
        dist.broadcast(first, 0)
        assert torch.equal(mine, first), f"{name} differs between rank 0 and rank {dist.get_rank()}"
