"""Part 2: what compression does to learning. Two real ranks on loopback, one cell (arm and seed) at a time.

Speed plays no part here, so the link is not shaped: seconds come from part 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from gradsync.launch.spawn import RankPool
from slow_link import data
from slow_link.model import RATES, SIZES, build, digest, evaluate, optimizer_of
from slow_link.variants import VARIANTS

_LOOK = 50  # steps from one look at the held-out text to the next
_WARM_UP = 100
_FLOOR = 0.1  # of the learning rate, at the end of the cosine
LAST = 50  # steps, whose mean is the final training loss


@dataclass(frozen=True)
class Task:
    """What every arm learns, alike but for the seed."""

    size: str = "small"
    steps: int = 1000
    optimizer: str = "adamw"
    ranks: int = 2
    in_one_process: bool = False

    @property
    def label(self) -> str:
        """
        >>> Task().label
        '2 ranks, small, 1000 steps'
        """
        who = "replicas" if self.in_one_process else "ranks"
        by = "" if self.optimizer == "adamw" else f", {self.optimizer}"
        return f"{self.ranks} {who}, {self.size}, {self.steps} steps{by}"

    def lr_at(self, step: int) -> float:
        """Linear up, then a cosine down.

        >>> task = Task()
        >>> task.lr_at(0), task.lr_at(100), round(task.lr_at(1000), 6)
        (1e-05, 0.001, 0.0001)
        """
        lr, warm_up = RATES[self.optimizer], min(_WARM_UP, self.steps // 10)
        if step < warm_up:
            return lr * (step + 1) / warm_up
        done = (step - warm_up) / max(1, self.steps - warm_up)
        return lr * (_FLOOR + (1 - _FLOOR) * (1 + math.cos(math.pi * done)) / 2)

    def looks(self) -> Iterator[int]:
        """After how many steps the held-out text is looked at."""
        return (step for step in range(1, self.steps + 1) if step % _LOOK == 0 or step == self.steps)


def learn(pool: RankPool, task: Task, arm: str, seed: int) -> dict[str, Any]:
    """One cell: the curves, and what they end in."""
    by_rank = pool.run(run_rank, asdict(task), arm, seed, timeout=36000)
    if len({rank["weights"] for rank in by_rank}) > 1:
        raise RuntimeError(f"{arm}, seed {seed}: the ranks ended with different weights")
    train = [sum(same) / len(same) for same in zip(*(rank["train"] for rank in by_rank), strict=True)]
    held_out = [sum(same) / len(same) for same in zip(*(rank["held_out"] for rank in by_rank), strict=True)]
    return cell(task, train, held_out)


def cell(task: Task, train: list[float], held_out: list[float]) -> dict[str, Any]:
    """What is kept of a run: the loss in every step, and on held-out text where it was looked at."""
    return {
        "text": data.read().digest,
        "final_held_out": round(held_out[-1], 5),
        "final_train": round(sum(train[-LAST:]) / len(train[-LAST:]), 5),
        "held_out": [[step, round(loss, 5)] for step, loss in zip(task.looks(), held_out, strict=True)],
        "train": [round(loss, 4) for loss in train],
    }


def run_rank(fields: dict[str, Any], arm: str, seed: int) -> dict[str, Any]:
    """One rank's curves; of the held-out text each rank reads its part."""
    torch.set_num_threads(1)
    task, rank = Task(**fields), dist.get_rank()
    shape = SIZES[task.size]
    model = build(shape, seed)
    replica = VARIANTS[arm].make(model, optimizer_of(model, task.optimizer))
    unseen = data.held_out(shape, rank, task.ranks)
    looks = set(task.looks())
    train: list[float] = []
    held_out: list[float] = []
    for step in range(task.steps):
        for group in replica.optimizer.param_groups:
            group["lr"] = task.lr_at(step)
        train.append(replica.step(data.batch(shape, seed, step, rank)).item())
        if step + 1 in looks:
            held_out.append(evaluate(model, unseen))
    replica.close()
    return {"train": train, "held_out": held_out, "weights": digest(model)}
