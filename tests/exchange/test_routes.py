"""Routes: the one asked for is taken, and a tensor that is cut into parts is summed whole, or not at all."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from transits import CPU, open_exchange

import gradsync as gs
from gradsync.algorithms.schedule import Schedule, Transfer
from gradsync.cluster import Hosts
from gradsync.errors import GradSyncError
from gradsync.exchange.flat import Form
from gradsync.exchange.routes import _LEAST_NBYTES, _MOST_NBYTES, _NUM_PARTS, HierarchicalRoute, checked
from gradsync.exchange.sender import GradientExchange
from gradsync.transport.gloo_channel import GlooChannel
from gradsync.transport.groups import MESSAGES
from gradsync.transport.lane import Lane
from gradsync.transport.lane_thread import LaneThread
from gradsync.transport.pending import LaneTask

NAMES = ("native", "ring", "tree", "halving_doubling", "hierarchical", "shared_memory")


def name_of_route(algorithm: str, hosts: str) -> str:
    exchange = open_exchange(gs.Plan(getattr(gs, algorithm)()), hosts)
    return exchange.exact.route(Form(100, torch.float32, CPU)).name


@pytest.mark.parametrize("hosts", ["a", "aa", "ab", "aab"])
def test_the_algorithm_asked_for_is_taken_by_two_ranks_and_more(hosts: str, run: Any) -> None:
    for name in NAMES if hosts == "aa" else NAMES[:-1]:
        assert run(name_of_route, name, hosts, ranks=len(hosts)) == [name if len(hosts) > 1 else "native"] * len(hosts)


def hierarchical() -> tuple[GradientExchange, HierarchicalRoute, list[LaneTask]]:
    """The route, and what it hands to the thread that it hires."""
    crossed: list[LaneTask] = []

    def hire(lane: Lane) -> LaneThread:
        thread = real(lane)
        take = thread.take

        def count(task: LaneTask) -> None:
            crossed.append(task)
            take(task)

        thread.take = count  # type: ignore[method-assign]
        return thread

    real = Lane.hire
    with patch.object(Lane, "hire", hire):
        exchange = open_exchange(gs.Plan(gs.hierarchical()), "aab")
    route = exchange.exact.route(Form(1, torch.int32, CPU))
    assert isinstance(route, HierarchicalRoute)
    return exchange, route, crossed


def sum_in_parts(nbytes: int) -> list[int]:
    """How many parts crossed between the hosts: of a tensor in the team's memory, and of one that is not."""
    exchange, route, crossed = hierarchical()
    form, found = Form(nbytes // 4, torch.int32, CPU), []
    for flat in (exchange.exact.allocate([form])[0], form.zeros()):
        torch.arange(form.numel, out=flat).add_(dist.get_rank())
        crossed.clear()
        exchange.lane.wait(route.launch(flat, 0))
        assert torch.equal(flat, 3 * torch.arange(form.numel, dtype=torch.int32) + 3)
        found.append(len(crossed))
    return found


def test_a_tensor_goes_in_parts_so_that_some_are_summed_while_others_cross(run: Any) -> None:
    assert run(sum_in_parts, 400, ranks=3) == [[1, 1]] * 3
    for nbytes in (2 * _LEAST_NBYTES, _NUM_PARTS * _LEAST_NBYTES, 5 * _LEAST_NBYTES):
        parts = min(nbytes // _LEAST_NBYTES, _NUM_PARTS)
        for found in run(sum_in_parts, nbytes, ranks=3):
            assert all(parts <= number <= parts + 1 for number in found)  # one more for what is left


def test_more_parts_than_are_under_way_at_a_time_are_summed_too(run: Any) -> None:
    for found in run(sum_in_parts, (_NUM_PARTS + 1) * _MOST_NBYTES + 400, ranks=3):
        assert found == [_NUM_PARTS + 2] * 2


class BrokenChannel(GlooChannel):
    """Nothing goes over it."""

    def __init__(self) -> None: ...

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Any:
        raise ConnectionError("the wire broke")

    recv = send


def sum_over_a_broken_wire() -> str:
    exchange, route, _ = hierarchical()
    exchange.lane.groups.data[MESSAGES] = BrokenChannel()
    pending = route.launch(torch.ones(100), 0)
    assert pending.landed(30.0)
    try:
        pending.settle()
    except ConnectionError as error:
        return str(error)
    return "nothing"


def test_what_fails_between_hosts_fails_the_sum(run: Any) -> None:
    assert run(sum_over_a_broken_wire, ranks=3) == ["the wire broke"] * 3


@dataclass(frozen=True)
class Given:
    """An algorithm of another project's, which makes what a test says; it raises what is an error."""

    made: object

    def schedule(self, hosts: object) -> Any:
        if isinstance(self.made, Exception):
            raise self.made
        return self.made


Given.__module__ = "another.project"
HOSTS: Hosts = ((0, 1),)
THERE, BACK = (Transfer(1, 0, 0, add=True),), (Transfer(0, 1, 0, add=False),)


def test_an_algorithm_from_outside_that_adds_up_is_taken() -> None:
    schedule = Schedule(2, 1, (THERE, BACK))
    assert checked(Given(schedule), HOSTS) is schedule


def test_an_algorithm_from_outside_that_does_not_add_up_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^Given\.schedule does not make every rank's sum: "):
        checked(Given(Schedule(2, 1, (THERE,))), HOSTS)


def test_an_algorithm_for_other_ranks_is_refused() -> None:
    schedule = Schedule(2, 1, (THERE, BACK))
    with pytest.raises(ValueError, match=r"^Given\.schedule is for 2 ranks, but the group has 3$"):
        checked(Given(schedule), ((0, 1), (2,)))


def test_what_is_no_schedule_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must return a gradsync\.algorithms\.schedule\.Schedule, got 'a ring'"):
        checked(Given("a ring"), HOSTS)


def test_what_an_algorithm_from_outside_raises_is_told_as_its_own() -> None:
    said = "the algorithm Given raised IndexError in Given.schedule(((0, 1),)): no such rank; correct its code"
    with pytest.raises(GradSyncError, match=f"^{re.escape(said)}"):
        checked(Given(IndexError("no such rank")), HOSTS)


# Of the bytes of a tensor, how many each rank sends over a network, by hand.
SHARES = {
    "native": [4 / 3, 4 / 3, 4 / 3],
    "ring": [4 / 3, 4 / 3, 4 / 3],
    "tree": [1.0, 1.5, 1.5],  # two trees of half the data; one rank is a leaf of both, each other the root of one
    "hierarchical": [0.5, 0.5, 1.0],  # each of two brings its half to the third, which sends each half back
}


def launch_by(algorithm: str) -> float:
    """The share that this rank sends; what is pending is named after the bucket, with its bytes."""
    exchange = open_exchange(gs.Plan(getattr(gs, algorithm)()), "aab")
    lane = exchange.lane
    flat = torch.arange(30, dtype=torch.float64) + dist.get_rank()
    route = exchange.exact.route(Form(flat.numel(), flat.dtype, CPU))
    pending = route.launch(flat, 5)
    assert (pending.what, pending.nbytes, pending.bucket) == ("bucket 5", 240, 5)
    lane.wait(pending)
    assert flat.tolist() == [3 * index + 3 for index in range(30)]
    return route.sent_share


@pytest.mark.parametrize("algorithm", SHARES)
def test_a_sum_under_way_is_named_and_costs_what_its_algorithm_sends(algorithm: str, run: Any) -> None:
    assert sorted(run(launch_by, algorithm, ranks=3)) == pytest.approx(SHARES[algorithm])


def launch_in_memory() -> None:
    exchange = open_exchange(gs.Plan(gs.shared_memory()), "aa")
    form = Form(30, torch.float32, CPU)
    for flat in (exchange.exact.allocate([form])[0], form.zeros()):
        flat += dist.get_rank() + 1
        route = exchange.exact.route(form)
        pending = route.launch(flat, 5)
        assert (pending.what, pending.nbytes, pending.bucket) == ("bucket 5", 120, 5)
        exchange.lane.wait(pending)
        assert flat.tolist() == [3.0] * 30
        assert (route.sent_share, route.sums_in_team_memory) == (0.0, True)


def test_a_sum_in_memory_sends_nothing(run: Any) -> None:
    run(launch_in_memory)


def add_small_integers(algorithm: str) -> str:
    exchange = open_exchange(gs.Plan(getattr(gs, algorithm)()), "ab")
    flat = torch.full((4,), dist.get_rank() + 1, dtype=torch.int16)
    try:
        exchange.lane.wait(exchange.exact.launch(flat))
    except ValueError as error:
        return str(error)
    return str(flat.tolist())


def test_sixteen_bit_integers_are_refused_by_gloo_alone(run: Any) -> None:
    said = "gloo cannot add int16; use int32, or gs.shared_memory() on one host"
    assert run(add_small_integers, "native") == [said] * 2
    assert run(add_small_integers, "ring") == ["[3, 3, 3, 3]"] * 2
