"""Part 1: what a pace does to learning. Two real ranks, one cell (arm and seed) at a time.

On loopback, where steps are cheap: seconds and bytes come from part 2. What `async_sgd` learns depends on the clock
itself, on who is how late; here both ranks are about equally fast.

    every 50 steps   rank 0's parameters ──▶ both ranks, each reads its half of the held-out text
    at the end       sync.drain() first: what a user would save

Between two averages of `local_sgd`, `diloco` and `gossip` replicas differ, and rank 0's are what is looked at: what a
user has who saves rank 0's model just then.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from gradsync.launch.spawn import RankPool
from pace.variants import NUM_RANKS, SHAPE, VARIANTS
from slow_link import data
from slow_link.loss import LAST, Task
from slow_link.model import build, digest, evaluate, optimizer_of

_TIMEOUT_S = 3600.0


def learn(pool: RankPool, arm: str, seed: int, steps: int) -> dict[str, Any]:
    """One cell: the curves, and what they end in."""
    by_rank = pool.run(run_rank, arm, seed, steps, timeout=_TIMEOUT_S)
    train = [mean(same) for same in zip(*(rank["train"] for rank in by_rank), strict=True)]
    held_out = [mean(same) for same in zip(*(rank["held_out"] for rank in by_rank), strict=True)]
    looks = list(task_of(arm, steps).looks())
    begins = [0, *looks]
    return {
        "seed": seed,
        "text": data.read().digest,
        "replicas_end_equal": len({rank["weights"] for rank in by_rank}) == 1,
        "final_held_out": round(held_out[-1], 5),
        "final_train": round(mean(train[-LAST:]), 5),
        "held_out": [[step, round(loss, 5)] for step, loss in zip(looks, held_out, strict=True)],
        "train": [[end, round(mean(train[begin:end]), 5)] for begin, end in zip(begins, looks, strict=False)],
    }


def task_of(arm: str, steps: int) -> Task:
    """The task of all arms, but for those that take more steps."""
    return Task(steps=round(steps * VARIANTS[arm].stretch))


def run_rank(arm: str, seed: int, steps: int) -> dict[str, Any]:
    """One rank's curves."""
    torch.set_num_threads(1)
    rank, task = dist.get_rank(), task_of(arm, steps)
    model, twin = build(SHAPE, seed), build(SHAPE, seed)
    replica = VARIANTS[arm].make(model, optimizer_of(model))
    unseen = data.held_out(SHAPE, rank, NUM_RANKS)
    looks = set(task.looks())
    train: list[float] = []
    held_out: list[float] = []
    for step in range(task.steps):
        for group in replica.optimizer.param_groups:
            group["lr"] = task.lr_at(step)
        train.append(replica.step(data.batch(SHAPE, seed, step, rank)).item())
        if step + 1 == task.steps:
            replica.close()
        if step + 1 in looks:
            held_out.append(_look(model, twin, unseen))
    weights = digest(model)
    return {"train": train, "held_out": held_out, "weights": weights}


@torch.no_grad()
def _look(model: nn.Module, twin: nn.Module, unseen: data.Batch) -> float:
    """Rank 0's model on this rank's part of the held-out text; the model itself stays as it is."""
    flat = parameters_to_vector(model.parameters())
    dist.broadcast(flat, 0)
    vector_to_parameters(flat, twin.parameters())
    return evaluate(twin, unseen)
