"""Local SGD: when parameters are averaged, and what travels with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lines import Run, assert_equal_on_all_ranks, gathered, raised

import gradsync as gs

Ranks = Callable[..., list[Any]]


# When


def history(pace: Any, num: int) -> list[tuple[float, bool]]:
    """a after each step, and whether the replicas may differ."""
    run, seen = Run(gs.Plan(pace=pace)), []
    for _ in range(num):
        seen.append((run.step()[0], not run.sync.replicas_equal))
    run.sync.detach()
    return seen


def test_after_every_kth_step_all_have_the_mean(run: Ranks) -> None:
    first, second = run(history, gs.local_sgd(2), 4)
    assert first == [(0, True), (-3, False), (-4, True), (-7, False)]
    assert second == [(-2, True), (-3, False), (-6, True), (-7, False)]


def test_during_warmup_after_every_step(run: Ranks) -> None:
    seen = run(history, gs.local_sgd(3, warmup=2), 8)[0]
    assert [not differ for _, differ in seen] == [True, True, False, False, True, False, False, True]


def check_synchronous() -> None:
    runs = [Run(gs.Plan(pace=pace), width=5) for pace in (gs.local_sgd(1), gs.every_step())]
    for t in range(5):
        for each in runs:
            each.random_step(t)
        assert torch.equal(runs[0].parameters(), runs[1].parameters())
    for each in runs:
        each.sync.detach()


def test_with_one_step_it_is_synchronous_sgd(run: Ranks) -> None:
    run(check_synchronous)


def check_alone() -> None:
    for compress in (None, gs.int8()):
        runs = [Run(gs.Plan(pace=gs.local_sgd(2), compress=compress)), Run(gs.Plan())]
        for each in runs:
            for t in range(5):
                each.step(0.1 * t, 0.3)
        assert torch.equal(runs[0].parameters(), runs[1].parameters())
        assert runs[0].sync.stats()["num_averages"] == 2
        for each in runs:
            each.sync.detach()


def test_one_rank_alone_trains_as_without_us(run: Ranks) -> None:
    run(check_alone, ranks=1)


# What travels


def check_compressed() -> None:
    run = Run(gs.Plan(pace=gs.local_sgd(2), compress=gs.int4(block=32)), width=40)
    before, owed = run.parameters(), torch.zeros(80)
    for t in range(6):
        change = torch.randn(2, 40, generator=torch.Generator().manual_seed(1000 * t + run.rank))
        run.step(*change)
        owed += sum(gathered(change.flatten())) / 2
        if t % 2:
            assert_equal_on_all_ranks(run)
            residuals = run.sync.residuals()
            kept = sum(gathered(torch.cat([residuals["a"], residuals["b"]])))
            assert kept.abs().max() > 0
            torch.testing.assert_close(before - run.parameters() + kept, owed)
    run.sync.detach()


def test_of_compressed_changes_what_is_owed_is_sent_or_kept(run: Ranks) -> None:
    run(check_compressed)


def check_optimizer_state() -> None:
    run = Run(gs.Plan(pace=gs.local_sgd(2, optimizer_state=True)), momentum=0.5)
    run.step(steps=run.rank == 0)
    run.step(steps=run.rank == 0)  # rank 1 has made no step, so it has no momentum: rank 0 keeps its own
    run.sync.drain()  # rank 1 has not done yet what was due
    kept = run.optimizer.state[run.model.a].get("momentum_buffer")
    assert kept is None if run.rank else float(kept) == 1.5
    run.step()
    run.step()
    # Rank 0: 1½ → 1¾ → 1⅞. Rank 1: 3 → 4½. The mean is 3 3/16.
    assert float(run.optimizer.state[run.model.a]["momentum_buffer"]) == 3.1875
    assert_equal_on_all_ranks(run)
    run.sync.detach()


def test_momentum_is_averaged_where_all_ranks_have_it(run: Ranks) -> None:
    run(check_optimizer_state)


class Scalar(torch.nn.Module):
    """A parameter that is one number, as Adam's count of steps is."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a * x


def check_counts() -> None:
    model = Scalar()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.local_sgd(2, optimizer_state=True)))
    rank = dist.get_rank()
    for t in range(2):
        model(torch.tensor(1.0 + 2 * rank)).backward()
        if t or rank == 0:  # rank 1 makes one step, rank 0 two
            optimizer.step()
        optimizer.zero_grad()
    assert int(optimizer.state[model.a]["step"]) == 2 - rank
    first, second = gathered(optimizer.state[model.a]["exp_avg"])
    assert torch.equal(first, second)
    sync.detach()


def test_counts_of_steps_stay_each_ranks_own(run: Ranks) -> None:
    run(check_counts)


class Normed(torch.nn.Module):
    """A model with a buffer and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(3))
        self.whole = torch.nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
        self.frozen = torch.nn.Parameter(torch.full((3,), 0.1), requires_grad=False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self) -> torch.Tensor:
        self.count += 1
        return (self.a * self.frozen * self.whole).sum()


def check_buffers_and_frozen() -> None:
    model, rank = Normed(), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.local_sgd(2)))
    with torch.no_grad():
        model.count.fill_(10 * rank)
        model.frozen.fill_(0.1 + rank)
    for t in range(4):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert int(model.count) == t + 1 + (10 * rank if t == 0 else 0)
    assert torch.equal(model.frozen, torch.full((3,), 0.1 + rank))
    model.frozen.requires_grad_()
    assert "parameter frozen was frozen at attach" in raised(lambda: model().backward())
    sync.detach()


def test_buffers_come_from_rank_0_and_frozen_parameters_stay(run: Ranks) -> None:
    run(check_buffers_and_frozen)
