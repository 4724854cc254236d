"""Routes: the one asked for is taken, and a tensor that is cut into parts is summed whole, or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from transits import CPU, open_transit

import gradsync as gs
from gradsync.exchange.flat import Form
from gradsync.exchange.routes import _LEAST_NBYTES, _MOST_NBYTES, _NUM_PARTS, HierarchicalRoute
from gradsync.exchange.sender import Transit
from gradsync.transport.groups import MESSAGES
from gradsync.transport.pending import LaneTask

NAMES = ("native", "ring", "tree", "halving_doubling", "hierarchical", "shared_memory")


def name_of_route(algorithm: str, hosts: str) -> str:
    transit = open_transit(gs.Plan(getattr(gs, algorithm)()), hosts)
    return transit.exact.route(Form(100, torch.float32, CPU)).name


@pytest.mark.parametrize("hosts", ["a", "aa", "ab", "aab"])
def test_the_algorithm_asked_for_is_taken_by_two_ranks_and_more(hosts: str, run: Any) -> None:
    for name in NAMES if hosts == "aa" else NAMES[:-1]:
        assert run(name_of_route, name, hosts, ranks=len(hosts)) == [name if len(hosts) > 1 else "native"] * len(hosts)


def hierarchical() -> tuple[Transit, HierarchicalRoute]:
    transit = open_transit(gs.Plan(gs.hierarchical()), "aab")
    route = transit.exact.route(Form(1, torch.int32, CPU))
    assert isinstance(route, HierarchicalRoute)
    return transit, route


def sum_in_parts(nbytes: int) -> list[int]:
    """How many parts crossed between the hosts: of a tensor in the team's memory, and of one that is not."""
    transit, route = hierarchical()
    form, crossed, found = Form(nbytes // 4, torch.int32, CPU), list[LaneTask](), []
    take = route._wire.take

    def count(task: LaneTask) -> None:
        crossed.append(task)
        take(task)

    route._wire.take = count  # type: ignore[method-assign]
    for flat in (transit.exact.allocate([form])[0], form.zeros()):
        torch.arange(form.numel, out=flat).add_(dist.get_rank())
        crossed.clear()
        transit.lane.wait(route.launch(flat, 0))
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


class BrokenChannel:
    """Nothing goes over it."""

    def __getattr__(self, name: str) -> object:
        raise ConnectionError("the wire broke")


def sum_over_a_broken_wire() -> str:
    transit, route = hierarchical()
    transit.lane.groups.data[MESSAGES] = BrokenChannel()  # type: ignore[assignment]
    pending = route.launch(torch.ones(100), 0)
    assert pending.landed(30.0)
    try:
        pending.settle()
    except ConnectionError as error:
        return str(error)
    return "nothing"


def test_what_fails_between_hosts_fails_the_sum(run: Any) -> None:
    assert run(sum_over_a_broken_wire, ranks=3) == ["the wire broke"] * 3
