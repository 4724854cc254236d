"""Runs that are saved and continued, and what they owe."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gradsync as gs
from models import mlp
from yardstick import Context, plain_step

# Every kind of state at once: residuals, Q, and parameters that have neither.
RICH = gs.Plan(
    compress=gs.by_parameter([gs.rule(dims=1, compress=gs.sign()), gs.rule("2.*", compress=gs.powersgd(2))]),
    bucket_bytes=1024,
)


class Run:
    """A model in training, its data a function of rank and step."""

    def __init__(self, plan: gs.Plan, build: Callable[[], torch.nn.Module] = mlp) -> None:
        torch.manual_seed(3)
        self.model = build()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.sync = gs.attach(self.model, self.optimizer, plan)

    def train(self, steps: range) -> None:
        ctx = Context("gradsync", self.model, self.model, [self.optimizer], self.sync, dist.get_rank())
        for ctx.step in steps:
            ctx.generator.manual_seed(1000 * ctx.rank + ctx.step)
            plain_step(ctx)

    def copy(self, other: Run) -> None:
        """Weights and optimizer; the rest is ours."""
        self.model.load_state_dict(other.model.state_dict())
        self.optimizer.load_state_dict(deepcopy(other.optimizer.state_dict()))

    def assert_equals(self, other: Run) -> None:
        theirs = other.model.state_dict()
        for name, tensor in self.model.state_dict().items():
            assert torch.equal(tensor, theirs[name]), f"{name} differs after resuming"
        mine, state = self.sync.state_dict(), other.sync.state_dict()
        assert mine.keys() == state.keys()
        for key in state:
            assert torch.equal(mine[key].nan_to_num(), state[key].nan_to_num()), f"{key} differs after resuming"


def heard(call: Callable[[], Any]) -> list[str]:
    """What is warned of during a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught]


def union(folder: str, names: str = "*") -> dict[str, torch.Tensor]:
    """All these files as one state."""
    state: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob(f"{names}.pt")):
        state |= torch.load(file, weights_only=True)
    return state


def residual_sums(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Over all ranks in this state, by parameter."""
    sums: dict[str, torch.Tensor] = {}
    for key, tensor in state.items():
        if ".residual." in key:
            name = key.split(".residual.")[1]
            sums[name] = sums.get(name, torch.zeros_like(tensor, dtype=torch.float64)) + tensor.double()
    return sums
