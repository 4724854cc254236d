"""The same script under every launcher: one process, torchrun on one host or several, srun, mpirun.

    python examples/train.py
    torchrun --standalone --nproc-per-node 2 examples/train.py
    examples/torchrun_two_hosts.sh 0 10.0.0.1 29500 examples/train.py     # and with 1 for 0 on the other host
    sbatch examples/slurm.sbatch

`gs.init()` reads what the launcher says; nothing else here knows which one it was.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--compress", action="store_true", help="send gradients in 8 bits")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write each rank's weights there")
    arguments = parser.parse_args()

    gs.init()
    rank, device = dist.get_rank(), "cuda" if torch.cuda.is_available() else "cpu"  # gs.init chose which GPU
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sync = gs.attach(model, optimizer, gs.Plan(compress=gs.int8() if arguments.compress else None))

    data = torch.Generator().manual_seed(rank)  # each rank its own
    for step in range(arguments.steps):
        x = torch.randn(32, 16, generator=data).to(device)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % 25 == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)

    if rank == 0:
        stats = sync.stats()
        told = [f"{dist.get_world_size()} ranks"]
        told += [f"{1e3 * stats[key]:.2f} ms {key[:-2]}" for key in ("step_s", "exposed_s") if stats[key] is not None]
        print(", ".join(told), flush=True)
    if arguments.save is not None:
        arguments.save.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), arguments.save / f"rank{rank}.pt")
    sync.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
