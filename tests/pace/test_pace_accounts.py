"""What each pace says of itself after every step: its clock, what is under way, and whether replicas are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs
from gradsync.agreement.header import Flag
from gradsync.pace.contract import Due, OpenWindow, Pace, PaceMoments, SavedPace
from gradsync.plan import paces

Ranks = Callable[..., list[Any]]


def steps_of(pace: paces.Pace, num_steps: int, size: int = 3) -> Iterator[tuple[gs.GradSync, nn.Module]]:
    """After each step, in the middle of training; the gradient is the rank's own in every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(size, 1, bias=False), nn.Linear(1, size, bias=False))
    for param in model.parameters():
        nn.init.ones_(param)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = gs.attach(model, optimizer, gs.Plan(pace=pace, bucket_bytes=4096))
    for _ in range(num_steps):
        model(torch.full((1, size), float(dist.get_rank() + 1))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield sync, model
    sync.detach()


def numbers(state: SavedPace, kind: str, *keys: str) -> list[int]:
    both = {**state.shared, **state.own}
    return [int(both[f"{kind}.{key}"]) for key in keys]


# DiLoCo: of two fragments, k = 4, each travels for one step


def fragments(mixing: float) -> list[list[list[int]]]:
    """(launched at, synchronized at, equal at) of each fragment after every step, and after a drain."""
    found = []
    for number, (sync, _) in enumerate(steps_of(gs.diloco(4, fragments=2, delay=1, mixing=mixing), 6), 1):
        pace = sync._steps.pace
        state = pace.state()
        assert numbers(state, "diloco", "clock", "due") == [number, 0]
        found.append(state.shared["diloco.fragments"].tolist())
        if number == 6:
            sync.drain()
            found.append(pace.state().shared["diloco.fragments"].tolist())
            assert pace.replicas_equal
            assert pace.stats() == {"inner_steps": 6, "num_exchanges": 4}
        else:
            assert pace.stats() == {"inner_steps": number, "num_exchanges": [0, 1, 1, 2, 2][number - 1]}
            assert not pace.replicas_equal
    return found


def test_fragments_say_when_they_left_and_what_they_know_of(run: Ranks) -> None:
    """Launched after steps 2 and 4, merged one later; without mixing ranks are equal then."""
    none, merged = [-1, 0, 0], {0: [-1, 3, 3], 1: [-1, 5, 5]}
    expected = [
        [none, none],
        [[2, 0, 0], none],
        [merged[0], none],
        [merged[0], [4, 0, 0]],
        [merged[0], merged[1]],
        [[6, 3, 3], merged[1]],  # its turn again
        [[-1, 6, 6], [-1, 6, 6]],
    ]
    assert run(fragments, 0.0) == [expected] * 2


def test_what_is_mixed_is_not_equal_and_knows_only_of_what_was_sent(run: Ranks) -> None:
    none = [-1, 0, 0]
    expected = [
        [none, none],
        [[2, 0, 0], none],
        [[-1, 2, 0], none],
        [[-1, 2, 0], [4, 0, 0]],
        [[-1, 2, 0], [-1, 4, 0]],
        [[6, 2, 0], [-1, 4, 0]],
        [[-1, 6, 6], [-1, 6, 6]],
    ]
    assert run(fragments, 0.5) == [expected] * 2


def diloco_without_delay() -> list[tuple[int, bool]]:
    found = []
    for sync, _ in steps_of(gs.diloco(2), 4):
        pace = sync._steps.pace
        found.append((int(pace.stats()["num_exchanges"] or 0), pace.replicas_equal))
        assert not any(key.startswith("diloco.landed") for key in pace.state().shared), "nothing is ever under way"
    return found


def test_without_delay_what_leaves_is_there_after_the_same_step(run: Ranks) -> None:
    assert run(diloco_without_delay) == [[(0, False), (1, True), (1, False), (2, True)]] * 2


# Local SGD


def local_accounts(k: int, warmup: int) -> list[tuple[Any, Any, bool]]:
    found = []
    for number, (sync, _) in enumerate(steps_of(gs.local_sgd(k, warmup), 7), 1):
        pace = sync._steps.pace
        stats = pace.stats()
        last = number - int(stats["local_steps"] or 0)
        assert numbers(pace.state(), "local_sgd", "clock", "last", "due") == [number, last, 0]
        found.append((stats["local_steps"], stats["num_averages"], pace.replicas_equal))
    return found


@pytest.mark.parametrize(
    ("k", "warmup", "averaged_after"),
    [(3, 0, {3, 6}), (3, 2, {1, 2, 5}), (1, 0, set(range(1, 8))), (2, 1, {1, 3, 5, 7})],
)
def test_averages_come_in_the_warmup_after_each_and_then_after_every_kth_step(
    k: int, warmup: int, averaged_after: set[int], run: Ranks
) -> None:
    expected = []
    for number in range(1, 8):
        before = [each for each in averaged_after if each <= number]
        since = number - max(before, default=0)
        expected.append((since, len(before), since == 0))
    assert run(local_accounts, k, warmup) == [expected] * 2


def alone(pace: paces.Pace) -> list[bool]:
    return [sync._steps.pace.replicas_equal for sync, _ in steps_of(pace, 3)]


@pytest.mark.parametrize("pace", [gs.local_sgd(2), gs.diloco(2), gs.gossip(), gs.async_sgd(1)], ids=repr)
def test_one_rank_is_always_equal_to_itself(pace: paces.Pace, run: Ranks) -> None:
    assert run(alone, pace, ranks=1) == [[True] * 3]


# Gossip


def gossip_accounts(every: int) -> list[tuple[Any, Any, bool]]:
    found: list[tuple[Any, Any, bool]] = []
    for number, (sync, model) in enumerate(steps_of(gs.gossip(every=every), 4), 1):
        pace = sync._steps.pace
        stats = pace.stats()
        clock, rounds, due, apart = numbers(pace.state(), "gossip", "clock", "round", "due", "apart")
        assert (clock, rounds, due, bool(apart)) == (number, number // every, 0, not pace.replicas_equal)
        assert stats["push_weight"] == 1.0
        assert float(pace.state().own["gossip.weight"]) == 1.0
        found.append((stats["num_exchanges"], stats["replica_distance"] is None, pace.replicas_equal))
        if number == 4:
            sync.drain()
            assert pace.replicas_equal
            assert len({param.sum().item() for param in model.parameters()}) <= 2
    return found


def test_neighbours_count_their_exchanges(run: Ranks) -> None:
    assert run(gossip_accounts, 1) == [[(number, False, False) for number in range(1, 5)]] * 2
    assert run(gossip_accounts, 2) == [[(0, True, False), (1, False, False), (1, False, False), (2, False, False)]] * 2


def distance_to_the_sender() -> tuple[float, float]:
    """Before the first exchange of one parameter: 1 − lr · gradient on each rank, with lr 0.1 and gradients 1 and 3."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer, gs.Plan(pace=gs.gossip()))
    model(torch.tensor([[1.0 + 2.0 * dist.get_rank()]])).sum().backward()
    optimizer.step()
    distance, weight = sync.stats()["replica_distance"], model.weight.item()
    sync.detach()
    assert isinstance(distance, float)
    return distance, weight


def test_the_distance_is_relative_to_our_own_parameters(run: Ranks) -> None:
    (first, mean), (second, other) = run(distance_to_the_sender)
    assert (first, second) == (pytest.approx(0.2 / 0.9), pytest.approx(0.2 / 0.7))
    assert mean == other == pytest.approx(0.8)


# Delayed


def delayed_accounts(k: int) -> list[tuple[Any, bool, bool]]:
    found = []
    for number, (sync, _) in enumerate(steps_of(gs.delayed(k), 5), 1):
        pace = sync._steps.pace
        stats = pace.stats()
        state = pace.state()
        assert numbers(state, "delayed", "clock", "waiting") == [number, stats["num_waiting"]]
        assert bool(numbers(state, "delayed", "filling")[0]) is pace.mid_window
        slots = {key.split(".")[1] for key in state.shared if key.startswith("delayed.average")}
        assert slots == {f"average{slot}" for slot in range(k)}, "as many as there can be, whatever there is"
        found.append((stats["num_waiting"], pace.mid_window, sync.mid_window))
        if number == 5:
            drained = 0
            while sync.drain():
                drained += 1
            assert (drained, pace.stats()["num_waiting"], pace.mid_window) == (k, 0, False)
    return found


@pytest.mark.parametrize("k", [1, 3])
def test_so_many_averages_wait_as_steps_lie_between(k: int, run: Ranks) -> None:
    expected = [(min(number, k), number <= k, number <= k) for number in range(1, 6)]
    assert run(delayed_accounts, k) == [expected] * 2


# Asynchronous SGD


def async_accounts() -> list[tuple[Any, bool]]:
    found = []
    for sync, _ in steps_of(gs.async_sgd(0), 3):
        pace = sync._steps.pace
        stats = pace.stats()
        assert (stats["staleness_bound"], stats["staleness_max"], stats["clock_distance_max"]) == (0, 0, 0)
        assert stats["version"] == stats["clock"]
        found.append((stats["clock"], pace.replicas_equal))
        if stats["clock"] == 3:
            sync.drain()
            assert pace.replicas_equal
            state = pace.state()
            assert set(state.own) >= {"async_sgd.version", "async_sgd.clock"}
            assert int(state.own["async_sgd.clock"]) == 3
    return found


def test_a_clock_counts_pushes_and_replicas_are_level_after_a_drain(run: Ranks) -> None:
    assert run(async_accounts) == [[(1, False), (2, False), (3, False)]] * 2


# What all have in common


class Quiet(Pace):
    """A pace that does nothing."""

    def after_backward(self, count: int, aborted: Flag) -> bool:
        return False


class Listening(Quiet):
    """One that hears of every moment."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def before_forward(self) -> None:
        self.heard.append("before_forward")

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.heard.append("before_step")

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.heard.append("after_step")


def test_a_pace_that_says_nothing_is_that_of_every_step_without_a_window() -> None:
    pace = Quiet()
    assert (pace.k, pace.per_batch, pace.backwards, pace.micro_batches) == (1, 1, 0, 1)
    assert not any((pace.engine_averages, pace.replicas_differ, pace.dropped, pace.streams, pace.mid_window))
    assert pace.replicas_equal
    assert pace.drain() is False
    assert pace.has_room_for(0)
    assert not pace.has_room_for(1)
    assert pace.describe(3) == "bucket 3"
    assert pace.stats() == {}
    assert pace.open_window() == OpenWindow(0, {})
    assert pace.state() == SavedPace({}, {})


def test_a_pace_hears_of_the_moments_at_which_it_does_something_and_of_no_others() -> None:
    assert PaceMoments.of(Quiet()) == PaceMoments(None, None, None)
    pace, optimizer = Listening(), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    moments = PaceMoments.of(pace)
    assert moments.before_forward is not None
    assert moments.before_step is not None
    assert moments.after_step is not None
    moments.before_forward()
    moments.before_step(optimizer)
    moments.after_step(optimizer)
    assert pace.heard == ["before_forward", "before_step", "after_step"]


def test_what_is_due_is_done_by_the_last_optimizer_that_steps() -> None:
    one, two, other = (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(3))
    due = Due([one, two])
    assert not due
    assert not due.waits_for(one)
    assert not due.done_by(one)
    due.set()
    assert due
    assert due.waits_for(one)
    assert not due.waits_for(other)
    assert not due.done_by(one)
    assert not due.done_by(one), "twice is once"
    assert not due.waits_for(one)
    assert due.waits_for(two)
    assert due.done_by(two)
    due.set()
    assert due.waits_for(two), "of the next step"
    due.clear()
    assert not due
    assert not due.done_by(two)
