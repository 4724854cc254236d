"""A training with PyTorch's own PowerSGD hook, on ranks that may abort or wait for ever."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

BUCKET_CAP_MB = 0.05


def build() -> nn.Module:
    """Several buckets, no two of which have messages of one size."""
    torch.manual_seed(0)
    widths = [64, 96, 128, 160, 192, 224, 256]
    return nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths)))


def train(folder: Path, steps: int) -> None:
    """Each rank writes to its file in `folder` which steps came through."""
    ddp = DistributedDataParallel(build(), bucket_cap_mb=BUCKET_CAP_MB)
    ddp.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2), powerSGD_hook)
    with (folder / f"rank-{dist.get_rank()}.txt").open("w") as file:
        for step in range(steps):
            ddp(torch.randn(8, 64)).square().mean().backward()
            print(f"step {step}", file=file, flush=True)
