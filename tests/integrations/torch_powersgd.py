"""One rank of a training with PyTorch's own PowerSGD hook: `python torch_powersgd.py RANK STORE STEPS`.

It runs in a process of its own, since it may abort. It ends with exit code 0 if all steps came through.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from itertools import pairwise

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


def main(rank: int, store: str, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=10)
    )
    ddp = DistributedDataParallel(build(), bucket_cap_mb=BUCKET_CAP_MB)
    ddp.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2), powerSGD_hook)
    for step in range(steps):
        ddp(torch.randn(8, 64)).square().mean().backward()
        print(f"step {step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
