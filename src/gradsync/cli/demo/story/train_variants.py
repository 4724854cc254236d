"""The program of each rank of the demo: four ways to train the same model, a few steps of each in turn.

Interleaved, so that whatever else the machine does meets all arms alike:

    round 0   one process | no sync | DDP | gradsync
    round 1   one process | gradsync | DDP | no sync      turned by one, and backwards: no arm always
    round 2   DDP | gradsync | one process | no sync      follows the same other
    ...

In every arm rank r sees the same windows in step t; "one process" sees those of all ranks at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradsync.cli.bench.other_processes import OtherProcesses
from gradsync.cli.demo.story.corpus import Text, draw, read_library
from gradsync.cli.demo.story.demo_model import DemoShape, build, loss_of
from gradsync.cli.demo.story.weight_distance import WeightDistance, distance, flatten, largest_distance
from gradsync.cli.local_ranks import advance
from gradsync.engine.attach import attach
from gradsync.engine.handle import GradSync

ONE, ALONE, DDP, GRADSYNC = "one process", "no sync", "DDP", "gradsync"
VARIANTS = (ONE, ALONE, DDP, GRADSYNC)

MAX_RANKS = 16
_ROUND = 5  # steps of an arm before it is the next one's turn
_UNTIMED = 3  # first steps of an arm: DDP and gradsync learn in which order gradients come
_VALIDATION_WINDOWS = 256
_VALIDATION_SEED = 2**40  # no step draws with it
LEARNING_RATE = 3e-3


class DemoRecord(NamedTuple):
    """The record of one rank; the dicts that only rank 0 can fill are empty elsewhere."""

    rounds: dict[str, list[list[float]]]  # seconds of each timed step, by arm and round
    loss_before: float
    losses: dict[str, float]
    replicas: dict[str, WeightDistance]  # between the ranks, at the end
    from_ddp: WeightDistance | None  # between gradsync's rank 0 and DDP's
    sent: dict[str, float]  # bytes that each rank sends in a step
    waited_s: float  # what gradsync itself counted as waiting, per step
    busy_cores: float = 0.0  # what other processes of the host kept busy meanwhile, on rank 0


@dataclass
class DemoVariant:
    """One way to train, on this rank."""

    name: str
    model: nn.Module  # what is called; for DDP, the wrapper
    plain: nn.Module
    optimizer: torch.optim.Optimizer
    trains: bool  # whether this rank takes part
    # Seconds of each timed step, by round
    rounds: list[list[float]] = field(default_factory=list)


def train(shape: DemoShape, steps: int, folder: str) -> DemoRecord:
    """Run all arms for `steps` steps each; every rank calls it, in a group that exists."""
    text = read_library()
    arms, sync = _make_variants(shape)
    before = validate(arms[0].plain, text, shape)
    others = OtherProcesses()
    for number, first in enumerate(range(0, steps, _ROUND)):
        for arm in _in_turn(arms, number):
            dist.barrier()
            _run_round(arm, text, shape, range(first, min(first + _ROUND, steps)), folder)
    dist.barrier()
    busy_cores = others.cores()
    record = _final_record(arms, sync, text, shape, before)
    sync.detach()
    return record._replace(busy_cores=busy_cores)


def _make_variants(shape: DemoShape) -> tuple[list[DemoVariant], GradSync]:
    arms = []
    for name in VARIANTS:
        plain = build(shape)
        model = DistributedDataParallel(plain, gradient_as_bucket_view=True) if name == DDP else plain
        optimizer = torch.optim.AdamW(plain.parameters(), lr=LEARNING_RATE)
        arms.append(DemoVariant(name, model, plain, optimizer, trains=name != ONE or dist.get_rank() == 0))
    return arms, attach(arms[-1].plain, arms[-1].optimizer)


def _in_turn(arms: list[DemoVariant], number: int) -> list[DemoVariant]:
    turn = number % len(arms)
    order = arms[turn:] + arms[:turn]
    return order[::-1] if number % 2 else order


def _run_round(arm: DemoVariant, text: Text, shape: DemoShape, steps: range, folder: str) -> None:
    arm.rounds.append([])
    if not arm.trains:
        return
    with _all_threads() if arm.name == ONE else nullcontext():
        for step in steps:
            batch = _batch(arm, text, shape, step)
            start = time.perf_counter()
            loss_of(arm.model, batch).backward()
            arm.optimizer.step()
            arm.optimizer.zero_grad()
            if shape.device == "cuda":
                torch.cuda.synchronize()
            if step >= _UNTIMED:
                arm.rounds[-1].append(time.perf_counter() - start)
            if dist.get_rank() == 0:
                advance(folder)


def _batch(arm: DemoVariant, text: Text, shape: DemoShape, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    ranks = range(dist.get_world_size()) if arm.name == ONE else [dist.get_rank()]
    batches = [rank_batch(text, shape, step, rank) for rank in ranks]
    read, guess = zip(*batches, strict=True)
    return torch.cat(read), torch.cat(guess)


def rank_batch(text: Text, shape: DemoShape, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what this rank trains on in this step, the same in every arm."""
    windows, following = draw(text.train, shape.batch, shape.context, seed=step * MAX_RANKS + rank)
    return windows.to(shape.device), following.to(shape.device)


@contextmanager
def _all_threads() -> Iterator[None]:
    """This process has as many threads as all ranks together meanwhile."""
    own = torch.get_num_threads()
    torch.set_num_threads(own * dist.get_world_size())
    try:
        yield
    finally:
        torch.set_num_threads(own)


def _final_record(arms: list[DemoVariant], sync: GradSync, text: Text, shape: DemoShape, before: float) -> DemoRecord:
    rounds = {arm.name: arm.rounds for arm in arms}
    weights = {arm.name: _gather(flatten(arm.plain.parameters())) for arm in arms if arm.name != ONE}
    if dist.get_rank() != 0:
        return DemoRecord(rounds, before, {}, {}, None, {}, 0.0)
    stats = sync.stats()
    gradients = sum(p.numel() * p.element_size() for p in arms[0].plain.parameters())
    return DemoRecord(
        rounds,
        before,
        losses={arm.name: validate(arm.plain, text, shape) for arm in arms},
        replicas={name: largest_distance(replicas) for name, replicas in weights.items()},
        from_ddp=distance(weights[DDP][0], weights[GRADSYNC][0]),
        sent={
            ONE: 0,
            ALONE: 0,
            DDP: ring_bytes(gradients, dist.get_world_size()),
            GRADSYNC: int(stats["sent_nbytes"] or 0),
        },
        waited_s=float(stats["exposed_s"] or 0),
    )


def ring_bytes(payload: int, ranks: int) -> float:
    """Return how many bytes each rank sends when a ring averages the payload.

    >>> ring_bytes(1000, 2), ring_bytes(1000, 4)
    (1000.0, 1500.0)
    """
    return 2 * (ranks - 1) / ranks * payload


def _gather(weights: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's weights on rank 0, nothing elsewhere."""
    if dist.get_rank() != 0:
        dist.gather(weights)
        return []
    replicas = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.gather(weights, replicas)
    return replicas


@torch.no_grad()
def validate(model: nn.Module, text: Text, shape: DemoShape, windows: int = _VALIDATION_WINDOWS) -> float:
    """Return the model's loss on files that nobody trained on."""
    characters, following = draw(text.validation, windows, shape.context, seed=_VALIDATION_SEED)
    return float(loss_of(model, (characters.to(shape.device), following.to(shape.device))))
