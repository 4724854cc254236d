"""DiLoCo through checkpoints, odd steps, unequal drains and a death: the ranks stay in step, or say so."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lines import GRADIENTS, Line, Run, check_continuation, heard, raised

import gradsync as gs
from gradsync.launch.spawn import RankPool
from gradsync.transport.host_meeting import declare_host

OUTER = gs.nesterov(0.5, 0.5)
PLAIN = gs.nesterov(1.0, 0.0)
Ranks = Callable[..., list[Any]]


# Saving


@pytest.mark.parametrize(
    ("pace", "compress"),
    [
        (gs.diloco(3, OUTER), None),
        (gs.diloco(4, OUTER, fragments=2, delay=3, mixing=0.25), None),
        (gs.diloco(4, gs.nesterov(0.5, 0.0), fragments=4, delay=1), gs.int4(block=32)),
    ],
    ids=["plain", "delayed", "compressed"],
)
def test_continuing_is_the_uninterrupted_run(pace: Any, compress: Any, run: Ranks) -> None:
    """With delay=3 of k=4 and two fragments, one is under way at every cut, and two at some."""
    run(check_continuation, gs.Plan(pace=pace, compress=compress), (0, 2, 3, 5, 8), 10)


def check_other_states() -> None:
    local, outer, other = (
        Run(gs.Plan(pace=pace)) for pace in (gs.local_sgd(4), gs.diloco(4, OUTER), gs.diloco(4, OUTER, fragments=2))
    )
    local.steps(3)  # −2 on rank 0, −8 on rank 1
    outer.model.load_state_dict(local.model.state_dict())
    said = heard(lambda: outer.sync.load_state_dict(local.sync.state_dict()))
    assert len(said) == (outer.rank == 0)
    assert not said or "this plan's is diloco" in said[0]
    assert outer.values == [-5, -8]
    assert outer.sync.replicas_equal
    outer.steps(1)
    state = outer.sync.state_dict()
    other.model.load_state_dict(outer.model.state_dict())
    assert heard(lambda: other.sync.load_state_dict(state)) == []
    assert not other.sync.replicas_equal
    # Both: Δ = 2 for a, 3 for b, and no momentum before.
    assert other.drain() == outer.drain() == [-5 - 0.5 * (2 + 1), -8 - 0.5 * (3 + 1.5)]
    for each in (local, outer, other):
        each.sync.detach()


def test_a_state_of_another_pace_begins_anew_and_one_of_other_fragments_goes_on(run: Ranks) -> None:
    run(check_other_states)


def check_other_frozen() -> None:
    states, told = [], []
    for frozen in (True, False):
        model = Line()
        model.a.requires_grad_(not frozen)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = gs.attach(model, optimizer, gs.Plan(pace=gs.diloco(4, OUTER)))
        with torch.no_grad():
            model.a.fill_(float(dist.get_rank()))
        told.append(heard(lambda sync=sync: sync.load_state_dict(states[0] if states else sync.state_dict())))
        states.append(sync.state_dict())
        assert model.a.item() == (dist.get_rank() if frozen else 0.5)  # what is trained now begins from the mean
        sync.detach()
    assert told[0] == []
    assert len(told[1]) == (dist.get_rank() == 0)
    assert not told[1] or "this state was saved with other parameters frozen: diloco begins anew" in told[1][0]


def test_a_state_with_other_parameters_frozen_begins_anew_and_one_rank_says_so(run: Ranks) -> None:
    run(check_other_frozen)


# Odd steps and ends


def check_early_drain() -> None:
    for num in range(4):
        run = Run(gs.Plan(pace=gs.diloco(4, PLAIN)))
        run.steps(num)
        assert run.drain() == [1 - 2 * num, 1 - 3 * num], f"after {num} steps"
        assert run.sync.replicas_equal
        run.sync.detach()


def test_drain_brings_in_every_step_however_few(run: Ranks) -> None:
    run(check_early_drain)


def check_odd_steps() -> None:
    run = Run(gs.Plan(pace=gs.diloco(2, PLAIN)))
    run.step()
    run.step(steps=run.rank == 0)  # rank 1's GradScaler skips: it has made one step, to −2, and rank 0 two, to −1
    assert run.sync.replicas_equal != (run.rank == 1)
    run.step()  # before its forward rank 1 did what was due: −1½
    assert run.values[0] == -1.5 - GRADIENTS[run.rank][0]
    assert run.drain()[0] == -1.5 - 2
    assert run.steps(1)[0][0] == -5.5  # the clock goes on over drain(): this was step 4
    assert run.sync.replicas_equal
    run.sync.broadcast()
    run.step()
    with torch.no_grad():
        run.model.a.fill_(10 + run.rank)
    run.sync.broadcast(1)
    assert run.sync.replicas_equal
    assert run.steps(1)[0][0] == 11 - 2
    run.sync.detach()


def test_skipped_steps_drain_and_broadcast(run: Ranks) -> None:
    run(check_odd_steps)


class Counting(torch.nn.Module):
    """A model with a buffer that counts forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(2))
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self) -> torch.Tensor:
        self.count += 1
        return (self.a * self.frozen).sum()


def check_buffers_and_frozen() -> None:
    model, rank = Counting(), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.diloco(4, PLAIN, fragments=4, delay=3)))
    with torch.no_grad():
        model.count.fill_(10 * rank)
        model.frozen.fill_(1 + rank)
    counts = []
    for _ in range(5):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(int(model.count))
    # One parameter is one fragment, and departs after steps 1 and 5: there all have rank 0's, and go on counting.
    assert counts == [1, 2, 3, 4, 5]
    assert model.frozen.tolist() == [1 + rank] * 2
    assert not any("frozen" in key for key in sync.state_dict() if "pace" in key)
    model.frozen.requires_grad_()
    text = raised(lambda: model().backward())
    assert "parameter frozen was frozen at attach and requires a gradient now" in text
    sync.detach()


def test_buffers_come_from_rank_0_and_frozen_parameters_stay(run: Ranks) -> None:
    run(check_buffers_and_frozen)


def check_unequal_drain(pace: Any, drains_after: tuple[int, int]) -> str:
    run = Run(gs.Plan(pace=pace), guard=gs.Guard(timeout=20.0))

    def train() -> None:
        for t in range(8):
            if t == drains_after[run.rank]:
                run.drain()
            run.step()

    text = raised(train)
    run.sync.detach()
    return text


@pytest.mark.parametrize(
    ("drains_after", "said"),
    [((3, 9), "rank 0 is in drain() but rank 1 is in an average"), ((2, 3), "drain() was called after [2, 3]")],
)
def test_ranks_that_drain_unequally_say_so(drains_after: tuple[int, int], said: str, run: Ranks) -> None:
    pace = gs.diloco(4, OUTER, delay=3) if drains_after == (2, 3) else gs.diloco(4, OUTER, fragments=2, delay=1)
    for text in run(check_unequal_drain, pace, drains_after):
        assert text.startswith("Disagreement")
        assert said in text


def check_across_hosts() -> str:
    declare_host(f"h{dist.get_rank()}")
    try:
        check_continuation(gs.Plan(pace=gs.diloco(4, OUTER, fragments=2, delay=3, mixing=0.25)), (2, 5), 8)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = gs.Plan(pace=gs.diloco(4, OUTER, fragments=2, delay=1))
        sync = gs.attach(model, optimizer, plan, guard=gs.Guard(timeout=20.0))

        def train() -> None:
            for t in range(8):
                if t == 3 and dist.get_rank() == 0:
                    sync.drain()
                model(torch.randn(6, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        text = raised(train)
        sync.detach()
        return text
    finally:
        declare_host(None)


def test_across_hosts_fragments_travel_and_unequal_drains_are_named_even_with_buffers(run: Ranks) -> None:
    for text in run(check_across_hosts):
        assert text.startswith("Disagreement: rank 0 is in drain() but rank 1 is in an average")


def check_killed() -> str:
    run = Run(gs.Plan(pace=gs.diloco(4, OUTER, fragments=2, delay=1)), guard=gs.Guard(timeout=30.0, dead_after=1.5))
    run.steps(3)
    if run.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return raised(lambda: run.steps(8))


def test_a_rank_that_dies_while_a_fragment_travels_is_named(pool: RankPool) -> None:
    survivor = pool.outcomes(check_killed, ranks=2)[0]
    assert survivor.ok, survivor.text
    assert survivor.value.startswith("PeerLost: [rank 0/2")
    assert "rank 1" in survivor.value
