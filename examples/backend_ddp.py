"""A stock DistributedDataParallel script; gradsync is the import and the backend's name, and nothing else.

    torchrun --standalone --nproc-per-node 2 examples/backend_ddp.py
    torchrun --standalone --nproc-per-node 2 examples/backend_ddp.py --backend gloo     # the same weights, slower

Both print the same digest: the gradients are added up in shared memory, to the bit as gloo adds them.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync.backend  # noqa: F401  # registers "gradsync"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cpu:gradsync")
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()

    dist.init_process_group(arguments.backend, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(dist.get_rank())

    start = time.perf_counter()
    for _ in range(arguments.steps):
        x, y = torch.randn(32, 256, generator=data), torch.randint(0, 10, (32,), generator=data)
        nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    took = (time.perf_counter() - start) / arguments.steps

    if dist.get_rank() == 0:
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:12]
        print(f"{arguments.backend}: {1e3 * took:.1f} ms a step, weights {digest}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
