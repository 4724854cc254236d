"""Training that survives the death of a rank: exit with an error, let torchrun restart everybody, resume.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/resume.py --folder /tmp/run

When a rank dies, `backward()` raises `gs.PeerLost` on all others within seconds. Nothing catches it here: the processes
end with an error, torchrun starts all of them again, and they continue from the last checkpoint, to the bit as if
nothing had happened.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def save(file: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, sync: gs.GradSync) -> None:
    """Each rank its own file, for what compression has not sent yet is its own; never a half-written one."""
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "sync": sync.state_dict()}
    temporary = file.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.replace(file)


def newest(folder: Path, rank: int) -> int | None:
    """The newest step of which *every* rank has a checkpoint: one may have died while it wrote."""
    mine = {int(file.stem.split("-")[1]) for file in folder.glob(f"rank{rank}-*.pt")}
    have = torch.zeros(1 + max(mine, default=0), dtype=torch.int64)
    longest = torch.tensor([len(have)])
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    have = torch.zeros(int(longest), dtype=torch.int64)
    for step in mine:
        have[step] = 1
    gs.all_reduce(have, op="sum")
    complete = (have == dist.get_world_size()).nonzero().flatten().tolist()
    return complete[-1] if complete else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints go")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--compress", action="store_true", help="send gradients in 8 bits")
    parser.add_argument("--die", type=int, nargs=2, metavar=("RANK", "STEP"), help="kill this rank there, once")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)

    gs.init()
    rank = dist.get_rank()
    model, optimizer = build()
    sync = gs.attach(model, optimizer, gs.Plan(compress=gs.int8() if arguments.compress else None))
    start = newest(arguments.folder, rank) or 0
    if start:
        state = torch.load(arguments.folder / f"rank{rank}-{start}.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        sync.load_state_dict(state["sync"])
        print(f"rank {rank} resumes at step {start}", flush=True)

    for step in range(start, arguments.steps):
        # The data of a step follows from its number, so a resumed run sees what the first would have seen.
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        if arguments.die == [rank, step] and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % arguments.every == 0:
            save(arguments.folder / f"rank{rank}-{step + 1}.pt", step + 1, model, optimizer, sync)

    if rank == 0:
        torch.save(model.state_dict(), arguments.folder / "final.pt")
        print(f"done: loss {loss.item():.4f}", flush=True)
    sync.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
