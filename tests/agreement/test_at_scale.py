"""The control code of a step among simulated ranks: what it costs one does not grow with how many there are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from gradsync.agreement.outcome import HealthLog
from scale import attach_at_scale, header_at_scale, heartbeat_at_scale
from scale.simulated import Network, open_lanes


def calls_of(function: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """What it returns, and how many functions of Python it called."""
    count = 0

    def hear(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(hear)
    try:
        return function(*args), count
    finally:
        sys.setprofile(None)


def calls_in_a_step(ranks: int, per_host: int) -> tuple[int, int]:
    """Of a rank that leads nobody; and the messages of all, for each rank."""
    network = Network()
    lanes = open_lanes(network, ranks, per_host)
    network.begin()
    headers = {}
    for lane in lanes[:-1]:
        headers[lane.groups.rank] = header_at_scale.announce(lane, 0)
    last, announced = calls_of(header_at_scale.announce, lanes[-1], 0)
    network.run()
    _, judged = calls_of(header_at_scale.judge, lanes[-1], last, HealthLog(3))
    assert header_at_scale.judge(lanes[0], headers[0], HealthLog(3)).size == ranks
    return announced + judged, sum(network.messages.values())


@pytest.mark.parametrize("per_host", [1, 8])
def test_a_rank_does_as_much_in_a_step_of_two_thousand_as_in_one_of_sixteen(per_host: int) -> None:
    few, many = calls_in_a_step(16, per_host), calls_in_a_step(2048, per_host)
    assert many[0] == few[0]
    assert few[1] == 2 * 15
    assert many[1] == 2 * 2047


def test_who_is_out_of_step_is_named_in_the_same_words_among_a_thousand() -> None:
    found = header_at_scale.disagree(1024, 8)
    assert found["whole"] == 1024
    assert found["sentence"].startswith("rank 1021 is in synchronization 5 and rank 0 in 4")


def test_a_death_is_heard_by_all_within_a_second_of_its_bound() -> None:
    found = heartbeat_at_scale.measure(512, 2)
    assert len(found["named_after_s"]) == 3
    assert all(seconds <= heartbeat_at_scale.DEAD_AFTER_S + 1 for seconds in found["named_after_s"].values())
    few = heartbeat_at_scale.measure(64, 2)
    assert found["messages_per_s"]["most"] <= 2 * few["messages_per_s"]["most"]


def test_a_thousand_ranks_meet_in_twelve_rounds_and_compare_what_they_bring_in_two_messages() -> None:
    met = attach_at_scale.meet(1024, 8)
    assert met["rounds"] <= 12
    assert met["requests"]["most"] <= 64
    assert attach_at_scale.agree(1024, 8, parameters=10)["messages"] < 2
