"""Runs with delayed averages: a small network, and one weight that says what was applied."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs
from models import Scalar


def train(plan: gs.Plan) -> tuple[nn.Module, torch.optim.Optimizer, gs.GradSync]:
    model, optimizer = make_model()
    return model, optimizer, gs.attach(model, optimizer, plan)


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    model(torch.randn(5, 8, generator=generator)).square().mean().backward()


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def scalar(k: int, **options: Any) -> tuple[Scalar, torch.optim.Optimizer, gs.GradSync]:
    """The learning rate is 1, so the weight is minus the sum of what was applied."""
    model = Scalar()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, optimizer, gs.attach(model, optimizer, gs.Plan(pace=gs.delayed(k)), **options)


def step_and_zero(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()
