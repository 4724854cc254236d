"""What is trained: stacks of small blocks, sized for a step of about 10 ms and about 50 ms on one thread."""

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
    """A model and the shape of a batch for it."""

    build: Callable[[], nn.Module]
    batch: tuple[int, int]


def stack(depth: int, width: int) -> nn.Module:
    return nn.Sequential(*(Block(width) for _ in range(depth)))


WORKLOADS = {
    "10 ms": Workload(lambda: stack(8, 192), (96, 192)),
    "50 ms": Workload(lambda: stack(12, 384), (176, 384)),
}
