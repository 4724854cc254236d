"""Routes: the one asked for is taken, and a tensor that is cut into parts is summed whole, or not at all."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from transits import CPU, open_exchange

import gradsync as gs
from gradsync.exchange.flat import Form
from gradsync.exchange.routes import _LEAST_NBYTES, _MOST_NBYTES, _NUM_PARTS, HierarchicalRoute
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
