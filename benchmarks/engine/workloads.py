"""The models of the engine benchmark: a thousand small parameters, and few large ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn


class Block(nn.Module):
    """A residual block: the unit that is compiled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Workload(NamedTuple):
    """A model and a batch for it."""

    build: Callable[[], nn.Sequential]
    batch: tuple[int, ...]


def _stack(depth: int, width: int) -> nn.Sequential:
    return nn.Sequential(*(Block(width) for _ in range(depth)))


CPU = {
    "1000 small": Workload(lambda: _stack(250, 96), (256, 96)),
    "few large": Workload(lambda: _stack(5, 2048), (64, 2048)),
}
GPU = {
    "1000 small": Workload(lambda: _stack(250, 512), (4096, 512)),
    "few large": Workload(lambda: _stack(6, 2048), (16384, 2048)),
}
# Two ranks share one GPU and a loopback that moves about a gigabyte per second: less to send, less to compute.
SHARED_GPU = {
    "1000 small": Workload(lambda: _stack(250, 256), (4096, 256)),
    "few large": Workload(lambda: _stack(5, 2048), (8192, 2048)),
}
