"""Part 3: who waits for a slow rank. Four ranks on loopback; computing is a sleep, learning is real.

    at random       each step another rank, drawn by the seed, takes 150 ms instead of 50
    always rank 3   it takes 150 ms in every step

    synchronous   ███·│███·│·███│   a step takes as long as its slowest rank: always 150 ms
    asynchronous  ███ █ █ ███ █     a rank takes its own time, 75 ms on average, as long as it may run ahead

Every rank has the same number of steps to take, and a run ends when the last has drained.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import gradsync as gs
from gradsync.cli.demo.story.demo_model import DemoShape, loss_of
from gradsync.launch.spawn import RankPool
from gradsync.plan.paces import Pace
from pace.variants import finish
from slow_link import data
from slow_link.model import OPTIMIZERS, build, evaluate

NUM_RANKS = 4
SHAPE = DemoShape(layers=1, width=32, heads=2, context=32, batch=8)  # milliseconds a step: the sleep is what counts
LEARNING_RATE = 0.1
COMPUTE_S, SLOW_S = 0.05, 0.15
SYNCHRONOUS = "every_step"
_LOOK = 2  # steps of rank 0 from one copy of its parameters to the next
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Variant:
    """A pace; `needed(t)`: how many steps all ranks must have taken before any begins the next after its t-th."""

    pace: Pace
    needed: Callable[[int], int]


VARIANTS: dict[str, Variant] = {
    SYNCHRONOUS: Variant(gs.every_step(), lambda t: t),
    "async_sgd(4)": Variant(gs.async_sgd(4), lambda t: t - 4),
    "async_sgd(None)": Variant(gs.async_sgd(None), lambda t: 0),
    "local_sgd(8)": Variant(gs.local_sgd(8), lambda t: t // 8 * 8),
}
SCENES: dict[str, Callable[[random.Random], int]] = {
    "at random": lambda rng: rng.randrange(NUM_RANKS),
    "always rank 3": lambda rng: 3,
}


def slow_ranks(scene: str, seed: int, steps: int) -> list[int]:
    """Which rank is slow, by step; every rank and every arm finds the same.

    >>> slow_ranks("always rank 3", seed=0, steps=3)
    [3, 3, 3]
    """
    rng = random.Random(seed)
    return [SCENES[scene](rng) for _ in range(steps)]


def sleeps_alone(arm: str, slow: list[int]) -> float:
    """Seconds that a run would take if nothing but sleeping and waiting for others took time.

    >>> round(sleeps_alone("every_step", [0, 1, 2, 3]), 3), round(sleeps_alone("async_sgd(None)", [0, 1, 2, 3]), 3)
    (0.6, 0.3)
    """
    ends = [[0.0] * NUM_RANKS]  # after so many steps, by rank
    for step, late in enumerate(slow):
        ready = max(ends[max(0, VARIANTS[arm].needed(step))])
        times = (SLOW_S if rank == late else COMPUTE_S for rank in range(NUM_RANKS))
        ends.append([max(ready, end) + took for end, took in zip(ends[-1], times, strict=True)])
    return max(ends[-1])


def run(pool: RankPool, scene: str, arm: str, seed: int, steps: int) -> dict[str, Any]:
    """One cell: how long it took, how far all were when the first rank was done, and rank 0's loss by the clock."""
    by_rank = pool.run(run_rank, scene, arm, seed, steps, timeout=_TIMEOUT_S)
    begin = min(rank["begin"] for rank in by_rank)
    first = min(rank["ends"][-1] for rank in by_rank)
    return {
        "seed": seed,
        "steps": steps,
        "took_s": round(max(rank["drained"] for rank in by_rank) - begin, 4),
        "sleeps_alone_s": round(sleeps_alone(arm, slow_ranks(scene, seed, steps)), 4),
        "first_done_s": round(first - begin, 4),
        "steps_by_then": [sum(end <= first for end in rank["ends"]) for rank in by_rank],
        "staleness": by_rank[0]["staleness"],
        "final_held_out": by_rank[0]["held_out"][-1][1],
        "held_out": [[round(at - begin, 3), loss] for at, loss in by_rank[0]["held_out"]],
    }


def run_rank(scene: str, arm: str, seed: int, steps: int) -> dict[str, Any]:
    """One rank. Times are of the clock that all processes of a machine share."""
    torch.set_num_threads(1)
    rank, slow = dist.get_rank(), slow_ranks(scene, seed, steps)
    model = build(SHAPE, seed)
    optimizer = OPTIMIZERS["sgd"](model.parameters(), lr=LEARNING_RATE)
    sync = gs.attach(model, optimizer, gs.Plan(pace=VARIANTS[arm].pace))
    batches = [data.batch(SHAPE, seed, step, rank) for step in range(steps)]
    copies: list[tuple[float, torch.Tensor]] = []
    ends: list[float] = []
    dist.barrier()
    begin = time.monotonic()
    for step, batch in enumerate(batches):
        time.sleep(SLOW_S if slow[step] == rank else COMPUTE_S)
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.monotonic())
        if rank == 0 and (step + 1) % _LOOK == 0:
            copies.append((ends[-1], parameters_to_vector(model.parameters()).detach()))
    finish(sync, optimizer)
    drained = time.monotonic()
    staleness = {key: value for key, value in sync.stats().items() if key.startswith("staleness")}
    sync.detach()
    copies.append((drained, parameters_to_vector(model.parameters()).detach()))
    # Only now: looking takes time, which nobody should wait for.
    held_out = [(at, round(_look(model, flat), 5)) for at, flat in copies] if rank == 0 else []
    dist.barrier()
    return {"begin": begin, "ends": ends, "drained": drained, "held_out": held_out, "staleness": staleness}


def _look(model: nn.Module, flat: torch.Tensor) -> float:
    vector_to_parameters(flat, model.parameters())
    return evaluate(model, data.held_out(SHAPE))
