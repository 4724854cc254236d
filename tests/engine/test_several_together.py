"""What several models wait for outside of backward: ranks call them in any order, and run out of data at any time."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs
from autos import BUCKETS, choosing, cluster, overhearing
from models import Raises

Run = Callable[..., list[Any]]
Order = tuple[int, ...]
ORDERS = [((0, 1), (0, 1)), ((0, 1), (1, 0)), ((1, 0), (0, 1))]
UNEVEN = [(5, 3), (2, 4), (0, 2), (3, 3)]


class Pair:
    """Two models, each with an optimizer."""

    def __init__(self, plan: Any = None) -> None:
        self.rank = dist.get_rank()
        self.models = [self._model(number) for number in range(2)]
        self.optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in self.models]
        guard = gs.Guard(timeout=20)
        pairs = zip(self.models, self.optimizers, strict=True)
        self.syncs = [gs.attach(*pair, plan or gs.Plan(bucket_bytes=1024), guard=guard) for pair in pairs]

    @staticmethod
    def _model(number: int) -> nn.Module:
        torch.manual_seed(number)
        return nn.Sequential(nn.Linear(4, 12), nn.BatchNorm1d(12), nn.Linear(12, 2 + number))

    def loss(self, number: int, batch: int, raises: bool = False) -> torch.Tensor:
        """With `raises` its backward does, after the last gradient of the model."""
        generator = torch.Generator().manual_seed(1000 * self.rank + 10 * batch + number)
        x = torch.randn(4, 4, generator=generator)
        loss: torch.Tensor = self.models[number](Raises.apply(x.requires_grad_()) if raises else x).square().mean()
        return loss

    def step(self, *numbers: int) -> None:
        for number in numbers:
            self.optimizers[number].step()
            self.optimizers[number].zero_grad()

    def end(self) -> list[torch.Tensor]:
        for sync in self.syncs:
            sync.detach()
        found = [each.detach().clone() for model in self.models for each in (*model.parameters(), *model.buffers())]
        for each in found:
            first = each.clone()
            dist.broadcast(first, 0)
            assert torch.equal(each, first)
        return found


@contextlib.contextmanager
def joined(pair: Pair) -> Any:
    with pair.syncs[0].join(), pair.syncs[1].join():
        yield


def join_together(orders: list[Order], counts: Order, missing: bool) -> list[torch.Tensor]:
    pair = Pair()
    with joined(pair):
        for batch in range(counts[pair.rank]):
            order = orders[pair.rank]
            called = order[:1] if missing and pair.rank == 1 and batch == 1 else order
            torch.stack([pair.loss(number, batch) for number in called]).sum().backward()
            pair.step(0, 1)
    return pair.end()


def join_apart(orders: list[Order], counts: Order, missing: bool) -> list[torch.Tensor]:
    pair = Pair()
    for number in range(2):
        with pair.syncs[number].join():
            for batch in range(counts[pair.rank]):
                if not missing or pair.rank == 0 or batch != 1 or orders[1][0] == number:
                    pair.loss(number, batch).backward()
                pair.step(number)
    return pair.end()


def check_join(orders: list[Order], counts: Order, missing: bool = False) -> None:
    together = join_together(orders, counts, missing)
    for ours, theirs in zip(together, join_apart(orders, counts, missing), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("counts", UNEVEN, ids=str)
@pytest.mark.parametrize("orders", ORDERS, ids=str)
def test_inside_join_models_of_one_backward_may_be_called_in_any_order(
    orders: list[Order], counts: Order, run: Run
) -> None:
    run(check_join, orders, counts)


@pytest.mark.parametrize("orders", ORDERS, ids=str)
def test_inside_join_one_may_be_missing_in_a_loss(orders: list[Order], run: Run) -> None:
    run(check_join, orders, (4, 3), True)


def adversaries(counts: Order, twice: bool) -> list[torch.Tensor]:
    """The loop of a GAN: a backward and a step of each, of the first one twice as often perhaps."""
    pair = Pair()
    with joined(pair):
        for batch in range(counts[pair.rank]):
            pair.loss(0, batch).backward()
            pair.step(0)
            if not twice or batch % 2:
                pair.loss(1, batch).backward()
                pair.step(1)
    return pair.end()


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("counts", UNEVEN, ids=str)
def test_inside_join_models_may_have_backwards_of_their_own(counts: Order, twice: bool, run: Run) -> None:
    run(adversaries, counts, twice)


def raising(what: str, counts: Order) -> list[torch.Tensor]:
    """A backward, or the loader of both, raises on one rank in the midst of join(), and the loop goes on."""
    pair = Pair()

    class Batches:
        def __init__(self) -> None:
            self.left = iter(range(counts[pair.rank]))

        def __iter__(self) -> Batches:
            return self

        def __next__(self) -> int:
            batch = next(self.left)
            if what == "loader" and (pair.rank, batch) == (1, 1):
                raise ArithmeticError("a file is gone")
            return batch

    batches = iter(pair.syncs[1].data(pair.syncs[0].data(Batches())))
    with joined(pair):
        while True:
            with contextlib.suppress(ArithmeticError):
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                raises = what == "backward" and (pair.rank, batch) == (1, 1)
                order = ((0, 1), (1, 0))[pair.rank]
                torch.stack([pair.loss(number, batch, raises and number == 1) for number in order]).sum().backward()
                pair.step(0, 1)
    return pair.end()


def quietly(fn: Callable[..., Any], *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fn(*args)


@pytest.mark.parametrize("counts", UNEVEN[:2], ids=str)
@pytest.mark.parametrize("what", ["backward", "loader"])
def test_inside_join_what_raised_is_dropped_by_both(what: str, counts: Order, run: Run) -> None:
    run(quietly, raising, what, counts)


def leave_by_an_error() -> list[torch.Tensor]:
    """Both blocks end by an exception of every rank, and training goes on without them."""
    pair = Pair()
    with contextlib.suppress(ArithmeticError), joined(pair):
        torch.stack([pair.loss(number, 0) for number in range(2)]).sum().backward()
        pair.step(0, 1)
        raise ArithmeticError
    torch.stack([pair.loss(number, 1) for number in range(2)]).sum().backward()
    pair.step(0, 1)
    return pair.end()


def test_an_error_ends_both_blocks(run: Run) -> None:
    run(leave_by_an_error)


def choose(orders: list[Order], shared: bool) -> tuple[list[Any], list[torch.Tensor]]:
    with choosing(BUCKETS), overhearing():
        pair = Pair(gs.auto(cluster=cluster(), steps=2))
        for batch in range(6):
            if shared:
                torch.stack([pair.loss(number, batch) for number in orders[pair.rank]]).sum().backward()
                pair.step(0, 1)
                continue
            for number in range(2):
                pair.loss(number, batch).backward()
                pair.step(number)
        plans = [sync.plan.canonical() for sync in pair.syncs]
        return plans, pair.end()


@pytest.mark.parametrize("orders", ORDERS, ids=str)
def test_models_with_auto_may_be_called_in_any_order(orders: list[Order], run: Run) -> None:
    for plans, _ in run(choose, orders, True):
        assert plans == [BUCKETS.canonical()] * 2


def test_models_with_auto_may_have_backwards_of_their_own(run: Run) -> None:
    for plans, _ in run(choose, ORDERS[0], False):
        assert plans == [BUCKETS.canonical()] * 2


def choose_after_raising() -> list[torch.Tensor]:
    """The backward before the choice raises on one rank."""
    with choosing(BUCKETS), overhearing():
        pair = Pair(gs.auto(cluster=cluster(), steps=2))
        for batch in range(6):
            raises, order = (pair.rank, batch) == (1, 2), ((0, 1), (1, 0))[pair.rank]
            with contextlib.suppress(ArithmeticError):
                torch.stack([pair.loss(number, batch, raises and number == 1) for number in order]).sum().backward()
                pair.step(0, 1)
                continue
            for optimizer in pair.optimizers:
                optimizer.zero_grad()
        return pair.end()


def test_the_backward_before_the_choice_may_raise(run: Run) -> None:
    run(quietly, choose_after_raising)
