"""What is trained: stacks of small blocks, with so many samples that a step takes 10 ms or 50 ms on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Workload(NamedTuple):
    """A model, how long a step of it is to take, and a batch to begin with: how large it must be is measured."""

    build: Callable[[], nn.Module]
    width: int
    step_s: float
    samples: int


def stack(depth: int, width: int) -> nn.Module:
    return nn.Sequential(*(Block(width) for _ in range(depth)))


WORKLOADS = {
    "10 ms": Workload(lambda: stack(8, 192), 192, 0.01, 96),
    "50 ms": Workload(lambda: stack(12, 384), 384, 0.05, 176),
}
