"""Gossip: an exchange keeps the sum, drain makes the mean, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs
from gradsync.engine.handle import GradSync
from gradsync.launch.spawn import RankPool
from gradsync.plan.paces import Topology
from gradsync.transport.heartbeat import Phase
from in_a_tree import in_a_tree

Run = Callable[..., list[Any]]
TOPOLOGIES: list[Topology] = ["ring", "exponential"]


class Mixed(nn.Module):
    """Parameters of several types, and one that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(3, 5, dtype=torch.float64))
        self.usual = nn.Parameter(torch.zeros(4, 7))
        self.narrow = nn.Parameter(torch.zeros(9, dtype=torch.bfloat16))
        self.turning = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self) -> torch.Tensor:
        parts = [self.wide, self.usual, self.narrow, torch.view_as_real(self.turning)]
        return sum((part.float().square().sum() for part in parts), torch.zeros(()))


def flat(model: nn.Module) -> torch.Tensor:
    """All parameters, in 64 bits: what fits is not rounded."""
    parts = [torch.view_as_real(p) if p.is_complex() else p for p in model.parameters()]
    return torch.cat([part.detach().flatten().double() for part in parts])


def scatter(model: nn.Module) -> None:
    """Parameters of this rank's own: whole numbers below 64, so that a few halvings are exact, in bfloat16 too."""
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    with torch.no_grad():
        for param in (param for param in model.parameters() if param.requires_grad):
            param.copy_(torch.randint(0, 8, param.shape, generator=generator) * 8)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *inputs: torch.Tensor) -> float:
    loss = model(*inputs).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


# What an exchange keeps


def stand_still(topology: Topology, exchanges: int) -> tuple[list[torch.Tensor], list[dict[str, Any]], torch.Tensor]:
    """Parameters before and after each exchange, when no gradient changes them; and after drain()."""
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.gossip(topology), bucket_bytes=1024))
    assert sync.replicas_equal
    scatter(model)
    seen, stats = [flat(model)], []
    for _ in range(exchanges):
        step(model, optimizer)
        seen.append(flat(model))
        stats.append(sync.stats())
    assert sync.replicas_equal != (dist.get_world_size() > 1)
    assert not sync.drain()
    assert sync.replicas_equal
    assert not sync.drain()
    sync.detach()
    return seen, stats, flat(model)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_an_exchange_keeps_the_weighted_sum_of_parameters(ranks: int, topology: Topology, run: Run) -> None:
    outcomes = run(stand_still, topology, 3, ranks=ranks)
    sums = [sum(rank[0][i] for rank in outcomes) for i in range(4)]
    assert all(torch.equal(sums[0], later) for later in sums)
    for i in range(3):
        assert sum(stats[i]["push_weight"] for _, stats, _ in outcomes) == ranks
    for _, stats, drained in outcomes:
        assert torch.equal(drained, outcomes[0][2])
        assert torch.allclose(drained, sums[0] / ranks, rtol=1 / 256)  # bfloat16 has 8 bits
        assert stats[-1]["num_exchanges"] == (0 if ranks == 1 else 3)


def test_exponential_strides_average_exactly(run: Run) -> None:
    outcomes = run(stand_still, "exponential", 2, ranks=4)
    mean = sum(seen[0] for seen, _, _ in outcomes) / 4
    for seen, _, drained in outcomes:
        assert torch.equal(seen[2], mean)
        assert torch.equal(drained, mean)


def test_replicas_come_nearer_and_the_measure_says_so(run: Run) -> None:
    outcomes = run(stand_still, "ring", 6, ranks=4)
    for rank, (seen, stats, _) in enumerate(outcomes):
        distances = [each["replica_distance"] for each in stats]
        theirs = outcomes[(rank - 1) % 4][0]
        for i, distance in enumerate(distances):
            expected = (seen[i] - theirs[i])[:-6].norm() / seen[i][:-6].norm()  # the frozen ones do not travel
            assert distance == pytest.approx(float(expected), rel=1e-3)
        assert all(after < before for before, after in pairwise(distances))


# Training


def regress(plan: gs.Plan, steps: int, attach: bool = True) -> tuple[torch.Tensor, list[float], int]:
    """Dyadic data and rates. Every rank has its own part of the data, which has one solution."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-3)
    sync = gs.attach(model, optimizer, plan) if attach else None
    solution = torch.tensor([1.0, -2.0, 3.0, 0.5])
    losses = []
    for number in range(steps):
        generator = torch.Generator().manual_seed(number * 10 + dist.get_rank())
        inputs = torch.randint(-1, 2, (4, 4), generator=generator).float()
        loss = (model(inputs).squeeze(1) - inputs @ solution).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    exchanges = 0
    if sync is not None:
        exchanges = int(sync.stats().get("num_exchanges") or 0)
        sync.drain()
        sync.detach()
    return model.weight.detach(), losses, exchanges


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_one_rank_alone_trains_as_without_us(topology: Topology, run: Run) -> None:
    [ours] = run(regress, gs.Plan(pace=gs.gossip(topology)), 5, ranks=1)
    [plain] = run(regress, gs.Plan(), 5, False, ranks=1)
    assert torch.equal(ours[0], plain[0])
    assert ours[1] == plain[1]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_two_ranks_that_exchange_in_every_step_are_synchronous(topology: Topology, run: Run) -> None:
    """For plain SGD the mean of two steps is the step of the mean; with few bits there is no rounding."""
    ours = run(regress, gs.Plan(pace=gs.gossip(topology)), 3, ranks=2)
    both = run(regress, gs.Plan(), 3, ranks=2)
    assert all(torch.equal(weight, both[0][0]) for weight, *_ in ours)


@pytest.mark.parametrize(("topology", "ranks", "every"), [("ring", 3, 1), ("exponential", 4, 3), ("ring", 2, 4)])
def test_a_small_regression_is_learned(topology: Topology, ranks: int, every: int, run: Run) -> None:
    outcomes = run(regress, gs.Plan(pace=gs.gossip(topology, every)), 100, ranks=ranks)
    for weight, losses, exchanges in outcomes:
        assert torch.equal(weight, outcomes[0][0])
        assert torch.allclose(weight, torch.tensor([[1.0, -2.0, 3.0, 0.5]]), atol=1e-2)
        assert losses[-1] < losses[0] / 1000
        assert exchanges == 100 // every


def miss_a_step(last: bool) -> tuple[torch.Tensor, int]:
    """As a GradScaler that finds an infinity does, on rank 1 alone."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.gossip()))
    for number in range(3):
        model(torch.ones(1, 2)).sum().backward()
        if dist.get_rank() != 1 or number != (2 if last else 1):
            optimizer.step()
        optimizer.zero_grad()
    sync.drain()
    exchanges = int(sync.stats()["num_exchanges"] or 0)
    sync.detach()
    return model.weight.detach(), exchanges


@pytest.mark.parametrize("last", [False, True], ids=["in the middle", "before drain"])
def test_a_rank_that_skips_a_step_still_takes_part_in_the_exchange(last: bool, run: Run) -> None:
    for weight, exchanges in run(miss_a_step, last, ranks=4):
        assert weight.tolist() == [[-2.75, -2.75]]  # eleven steps of 1, over four ranks
        assert exchanges == 3


# Saving


def make() -> tuple[nn.Module, torch.optim.Optimizer, GradSync]:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, optimizer, gs.attach(model, optimizer, gs.Plan(pace=gs.gossip("exponential", every=2)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        generator = torch.Generator().manual_seed(number * 10 + dist.get_rank())
        step(model, optimizer, torch.randn(4, 3, generator=generator))


def continue_from(saved_after: int) -> None:
    model, optimizer, sync = make()
    train(model, optimizer, range(saved_after))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    state = sync.state_dict()
    number = dist.get_rank()
    assert [key for key in state if f"rank{number}.pace" in key] == [
        f"gradsync.rank{number}.pace.gossip.{key}" for key in ("clock", "round", "due", "apart", "weight")
    ]
    resumed_model, resumed_optimizer, resumed_sync = make()
    resumed_model.load_state_dict(saved[0])
    resumed_optimizer.load_state_dict(saved[1])
    resumed_sync.load_state_dict(state)
    assert resumed_sync.replicas_equal == sync.replicas_equal
    train(model, optimizer, range(saved_after, 9))
    train(resumed_model, resumed_optimizer, range(saved_after, 9))
    assert torch.equal(flat(model), flat(resumed_model))
    sync.drain()
    resumed_sync.drain()
    assert torch.equal(flat(model), flat(resumed_model))
    resumed_sync.detach()
    sync.detach()


@pytest.mark.parametrize("saved_after", [0, 3, 6])
def test_saving_and_continuing_is_the_uninterrupted_run(saved_after: int, run: Run) -> None:
    run(continue_from, saved_after, ranks=3)


def make_alike() -> list[torch.Tensor]:
    model, optimizer, sync = make()
    train(model, optimizer, range(5))
    sync.broadcast(1)
    assert sync.replicas_equal
    seen = [flat(model)]
    train(model, optimizer, range(5, 8))
    sync.drain()
    sync.detach()
    return [*seen, flat(model)]


def test_after_a_broadcast_all_begin_from_it(run: Run) -> None:
    first, *others = run(make_alike, ranks=3)
    for other in others:
        assert torch.equal(other[0], first[0])
        assert torch.equal(other[1], first[1])


# What goes wrong


def be_slow(slow: bool) -> torch.Tensor:
    """Rank 1 comes to each exchange when all others wait there."""
    model, optimizer, sync = make()
    for number in range(4):
        if slow and dist.get_rank() == 1 and number % 2:
            _until(lambda: all(s.state.phase == Phase.WAITING for s in sync._lane.liveness.peer_views().values()))
        train(model, optimizer, range(number, number + 1))
    seen = flat(model)
    sync.detach()
    return seen


def test_a_slow_rank_is_waited_for(run: Run) -> None:
    for slow, usual in zip(run(be_slow, True, ranks=4), run(be_slow, False, ranks=4), strict=True):
        assert torch.equal(slow, usual)


def lose(victim: int) -> tuple[str, tuple[int, ...], str]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = gs.Guard(timeout=30, dead_after=1.5)
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.gossip()), guard=guard)
    try:
        for number in range(5):
            if number == 3 and dist.get_rank() == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            train(model, optimizer, range(number, number + 1))
    except gs.PeerLost as error:
        sync.detach()
        return "PeerLost", error.ranks, str(error)
    return "nothing", (), ""


@pytest.mark.parametrize("hosts", ["aaaa", "aabb", "abcd"])
def test_a_killed_rank_is_named_by_all(hosts: str, pool: RankPool) -> None:
    outcomes = pool.outcomes(in_a_tree, lose, hosts, 2, ranks=4)
    assert outcomes[2].text == "the process was killed by SIGKILL"
    for rank in (0, 1, 3):
        kind, ranks, sentence = outcomes[rank].value
        assert (kind, ranks) == ("PeerLost", (2,)), outcomes[rank].text
        assert sentence.startswith(f"[rank {rank}/4 step 3")
        assert "rank 2 " in sentence


def run_on(then: str) -> str:
    """Rank 0 trains for a step more than the others, which do something else by then."""
    model, optimizer, sync = make()
    try:
        train(model, optimizer, range(6 if dist.get_rank() == 0 else 4))
        if then == "drain":
            sync.drain()
        elif then == "broadcast":
            sync.broadcast()
        elif then == "load":
            sync.load_state_dict(sync.state_dict())
        elif then == "gather":
            sync.state_dict(all_ranks=True)
    except gs.GradSyncError as error:
        with contextlib.suppress(gs.GradSyncError):
            sync.detach()
        return f"{type(error).__name__}: {error}"
    try:
        sync.detach()
    except gs.Disagreement as error:
        return f"Disagreement: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("then", "name"),
    [
        ("drain", "an average of its pace"),
        ("broadcast", "broadcast() or the end of join()"),
        ("load", "load_state_dict()"),
        ("gather", "state_dict(all_ranks=True)"),
    ],
)
def test_ranks_that_train_unequally_long_say_so_instead_of_waiting(then: str, name: str, run: Run) -> None:
    sentence = (
        f"Disagreement: rank 0 is in an exchange with its neighbours but rank 1 is in {name}; "
        "every rank must call the same, in the same step"
    )
    assert run(run_on, then, ranks=2) == [sentence] * 2


def test_a_rank_that_leaves_early_is_named_by_who_waits_for_it(run: Run) -> None:
    first, *others = run(run_on, "nothing", ranks=4)
    assert first.startswith("Disagreement: rank 0 is in an exchange with its neighbours but rank ")
    assert "is in detach(); every rank must take equally many steps" in first
    sentence = (
        r"Disagreement: rank 0 is in an exchange with its neighbours but rank [123] is in detach\(\); every rank must "
    )
    for said in others:  # who exchanged nothing with rank 0 hears nothing of it
        assert said == "nothing" or re.match(sentence, said)
    assert any(said != "nothing" for said in others)


def bring_nan() -> str:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.gossip()), guard=gs.Guard(nonfinite="raise"))
    train(model, optimizer, range(2))
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.bias[0] = float("nan")
    try:
        train(model, optimizer, range(2, 3))
    except gs.GradSyncError as error:
        finite = bool(flat(model).isfinite().all())
        sync.detach()
        return f"{finite} {type(error).__name__}: {error}"
    return "nothing"


def test_a_nan_goes_to_no_neighbour(run: Run) -> None:
    for rank, sentence in enumerate(run(bring_nan, ranks=3)):
        assert sentence.startswith(f"{rank != 1} NonFinite: [rank {rank}/3 step 2] rank 1 would have sent NaN or Inf")


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(0.01)
