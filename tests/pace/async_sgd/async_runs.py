"""A small regression that ranks train together, as the engine would drive it, and the same by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradsync.pace.async_sgd.worker import AsyncWorker
from gradsync.plan.guard import Guard
from gradsync.plan.paces import AsyncSGD
from gradsync.transport.groups import MESSAGES
from gradsync.transport.lane import Lane, open_lane

TIMEOUT = 20.0
Parameters = list[torch.Tensor]


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def make_optimizers(kind: str, model: torch.nn.Sequential) -> list[torch.optim.Optimizer]:
    if kind == "momentum":
        return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)]
    if kind == "adamw":
        groups = [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters(), "weight_decay": 0.1}]
        return [torch.optim.AdamW(groups, lr=0.01)]
    if kind == "two":
        return [torch.optim.Adam(model[0].parameters(), lr=0.01), torch.optim.SGD(model[2].parameters(), lr=0.1)]
    assert kind == "sgd"
    return [torch.optim.SGD(model.parameters(), lr=0.1)]


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    """The loss on the batch that this rank has in this step."""
    data = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(16, 3, generator=data)
    return torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))


def values(model: torch.nn.Module) -> Parameters:
    return [p.detach().clone() for p in model.parameters()]


Optimizers = Sequence[torch.optim.Optimizer]


def begin(
    model: torch.nn.Module, optimizers: Optimizers, settings: AsyncSGD, timeout: float = TIMEOUT
) -> tuple[Lane, AsyncWorker]:
    """What attach does."""
    lane = open_lane(dist.group.WORLD, Guard(timeout=TIMEOUT, dead_after=1.5), TIMEOUT)
    lane.groups.add_data(dist.group.WORLD, {MESSAGES: torch.device("cpu")})
    named = list(model.named_parameters())
    return lane, AsyncWorker(lane, lane.groups.data[MESSAGES], named, optimizers, settings, timeout)


@contextmanager
def attached(
    model: torch.nn.Module, optimizers: Optimizers, settings: AsyncSGD, timeout: float = TIMEOUT
) -> Iterator[AsyncWorker]:
    """From attach to detach; after an error every rank ends alone."""
    lane, run = begin(model, optimizers, settings, timeout)
    together = False
    try:
        yield run
        together = True
    finally:
        run.close(together)
        lane.close(together)


def steps(
    run: AsyncWorker,
    model: torch.nn.Module,
    optimizers: Optimizers,
    numbers: range,
    schedule: bool = False,
    before: Callable[[int], Any] = lambda _: None,
) -> list[float]:
    """The training loop of one worker; each step's loss."""
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers] if schedule else []
    losses = []
    for step in numbers:
        before(step)
        run.pull()
        loss = loss_of(model, dist.get_rank(), step)
        loss.backward()
        run.push()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        losses.append(loss.item())
    return losses


def synchronous(kind: str, ranks: int, numbers: range, schedule: bool = False) -> Parameters:
    """All ranks' work in one process: each gradient divided first, then added in rank order."""
    model = make_model()
    optimizers = make_optimizers(kind, model)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers] if schedule else []
    parameters = list(model.parameters())
    for step in numbers:
        sums: list[torch.Tensor] = []
        for rank in range(ranks):
            shares = [g / ranks for g in torch.autograd.grad(loss_of(model, rank, step), parameters)]
            sums = [a + b for a, b in zip(sums, shares, strict=True)] if sums else shares
        for parameter, gradient in zip(parameters, sums, strict=True):
            parameter.grad = gradient
        for each in (*optimizers, *schedulers):
            each.step()
    return values(model)


# Gates in the store, so that an order of events is forced without a clock.


def tell(event: str) -> None:
    dist.distributed_c10d._get_default_store().set(event, "1")


def await_event(event: str) -> None:
    dist.distributed_c10d._get_default_store().wait([event], timedelta(seconds=TIMEOUT))


# What the ranks of a test run


def train(kind: str, settings: AsyncSGD, num_steps: int, schedule: bool = False) -> dict[str, Any]:
    model = make_model()
    optimizers = make_optimizers(kind, model)
    with attached(model, optimizers, settings) as run:
        losses = steps(run, model, optimizers, range(num_steps), schedule)
        run.drain()
        return {"values": values(model), "losses": losses, "stats": run.stats()}


def train_by_hand(kind: str, ranks: int, num_steps: int, schedule: bool = False) -> Parameters:
    return synchronous(kind, ranks, range(num_steps), schedule)


def train_with_a_slow_rank(settings: AsyncSGD, slow_at: dict[int, int], num_steps: int) -> dict[str, Any]:
    """`slow_at[rank]`: before this step the rank waits until its neighbour is as far ahead as s allows."""
    model = make_model()
    optimizers = make_optimizers("sgd", model)
    rank, size = dist.get_rank(), dist.get_world_size()
    ahead = settings.max_staleness
    assert ahead is not None

    def before(step: int) -> None:
        tell(f"rank-{rank}-pushed-{step}")  # step counts the pushes so far
        if step == slow_at.get(rank):
            await_event(f"rank-{(rank + 1) % size}-pushed-{step + ahead + 1}")

    with attached(model, optimizers, settings) as run:
        steps(run, model, optimizers, range(num_steps), before=before)
        run.drain()
        return {"values": values(model), "stats": run.stats()}


def leave_early(settings: AsyncSGD, leaver: int, leaves_after: int, num_steps: int) -> dict[str, Any]:
    model = make_model()
    optimizers = make_optimizers("sgd", model)
    rank = dist.get_rank()
    with attached(model, optimizers, settings) as run:
        steps(run, model, optimizers, range(leaves_after if rank == leaver else num_steps))
        if rank == leaver:
            run.leave()
            await_event("others-done")  # its process lives, its worker does nothing
        else:
            tell("others-done")
        run.drain()
        first = values(model)
        run.drain(rejoin=True)
        steps(run, model, optimizers, range(num_steps, num_steps + 2))
        run.drain()
        return {"values": first, "stats": run.stats()}


def go_on_from_a_save(kind: str, settings: AsyncSGD, num_steps: int) -> dict[str, Any]:
    """Half the steps, saved; a fresh model and optimizer load it and do the rest."""
    half = num_steps // 2
    model = make_model()
    optimizers = make_optimizers(kind, model)
    with attached(model, optimizers, settings) as run:
        steps(run, model, optimizers, range(half))
        run.drain()
        saved = run.state()
    model = make_model()
    optimizers = make_optimizers(kind, model)
    with attached(model, optimizers, settings) as run:
        run.load(saved)
        clock = run.stats()["clock"]
        steps(run, model, optimizers, range(half, num_steps))
        run.drain()
        return {"values": values(model), "clock": clock, "stats": run.stats()}
