"""join() over several epochs: ranks with unequally many batches train as one process that has them all."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs
from yardstick import assert_replicas_equal

BATCHES = [[5, 2, 3], [0, 3, 1], [2, 2, 4]]  # of each rank, by epoch

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05),
}


class Way(NamedTuple):
    """How the loop goes: which mean a step is of."""

    per_step: int = 1  # micro-batches of a step: all but the last under no_sync()
    k: int = 1  # of accumulate(k)
    weighted: bool = False
    set_to_none: bool = True

    def weight(self, rank: int, number: int) -> float:
        return float(1 + (2 * rank + number) % 3) if self.weighted else 1.0


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def _loss(model: nn.Module, rank: int, epoch: int, number: int) -> torch.Tensor:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1000 * rank + 100 * epoch + number))
    loss: torch.Tensor = model(x).square().mean()
    return loss


def trained_together(name: str, way: Way) -> list[torch.Tensor]:
    model = _model()
    optimizer = OPTIMIZERS[name](model.parameters())
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.accumulate(way.k), bucket_bytes=1024))
    rank = dist.get_rank()
    for epoch in range(3):
        with sync.join():
            for number in range(BATCHES[rank][epoch]):
                if way.weighted and number % way.k == 0:
                    sync.set_batch_weight(way.weight(rank, number))
                for part in range(way.per_step - 1):
                    with sync.no_sync():
                        _loss(model, rank, epoch, 10 * part + number).backward()
                _loss(model, rank, epoch, 90 + number).backward()
                optimizer.step()
                optimizer.zero_grad(way.set_to_none)
            while way.k > 1 and sync.drain():
                optimizer.step()
                optimizer.zero_grad(way.set_to_none)
        assert all(p.grad is None or not p.grad.any() for p in model.parameters()), "something was left behind"
        assert_replicas_equal(model)
    sync.detach()
    return [p.detach().clone() for p in model.parameters()]


def _windows(count: int, k: int) -> Iterator[list[int]]:
    for first in range(0, count, k):
        yield list(range(first, min(first + k, count)))


def trained_alone(name: str, way: Way, ranks: int) -> list[torch.Tensor]:
    """One process: in every step the documented mean over the ranks that have data left."""
    model = _model()
    optimizer = OPTIMIZERS[name](model.parameters())
    for epoch in range(3):
        windows = [list(_windows(BATCHES[rank][epoch], way.k)) for rank in range(ranks)]
        for step in range(max(map(len, windows))):
            here = [(rank, each[step]) for rank, each in enumerate(windows) if step < len(each)]
            total = sum(way.weight(rank, window[0]) * len(window) for rank, window in here)
            for rank, window in here:
                for number in window:
                    losses = [_loss(model, rank, epoch, 10 * part + number) for part in range(way.per_step - 1)]
                    losses.append(_loss(model, rank, epoch, 90 + number))
                    (sum(losses) * (way.weight(rank, window[0]) / total)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def _check(name: str, way: Way, run: Callable[..., Any], ranks: int = 3) -> None:
    alone = trained_alone(name, way, ranks)
    for together in run(trained_together, name, way, ranks=ranks):
        for ours, theirs in zip(together, alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_epochs_of_uneven_data_train_as_one_process(name: str, run: Callable[..., Any]) -> None:
    _check(name, Way(), run)


@pytest.mark.parametrize(
    "way",
    [Way(set_to_none=False), Way(per_step=2), Way(k=2), Way(k=3, weighted=True, set_to_none=False), Way(weighted=True)],
    ids=["zeros", "no_sync", "accumulate", "weighted windows", "weighted"],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_so_do_they_in_every_kind_of_loop(way: Way, ranks: int, run: Callable[..., Any]) -> None:
    _check("momentum", way, run, ranks)


def leave_in_the_middle(k: int) -> tuple[list[str], float]:
    """Rank 1 leaves with a micro-batch that was never synchronized; then both train one more step."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.accumulate(k)))
    rank = dist.get_rank()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with sync.join():
            with sync.no_sync() if k == 1 else contextlib.nullcontext():
                model(torch.full((1, 1), 100.0)).sum().backward()
            if rank == 0:
                model(torch.full((1, 1), 4.0)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    optimizer.zero_grad()
    model.weight.data.zero_()
    for _ in range(k):
        model(torch.full((1, 1), float(rank + 1))).sum().backward()
    optimizer.step()
    sync.detach()
    return [str(each.message) for each in caught], model.weight.item()


@pytest.mark.parametrize("k", [1, 2])
def test_what_was_never_synchronized_is_lost_with_a_warning(k: int, run: Callable[..., Any]) -> None:
    (first, ours), (second, theirs) = run(leave_in_the_middle, k)
    assert not first
    assert len(second) == 1
    assert ("under no_sync() are lost" if k == 1 else "micro-batches of a short last window are lost") in second[0]
    assert ours == theirs == -1.5
