"""A step's header among simulated ranks: what it costs each, and what is said when one is out of step."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from functools import partial
from statistics import mean, median
from typing import Any

import gradsync as gs
from gradsync.agreement.calls import check_same_call
from gradsync.agreement.header import Head, HeaderExchange, Headers, Mark
from gradsync.agreement.outcome import HealthLog, step_outcome
from scale.simulated import Events, Network, SimulatedLane, open_lanes

PARAMETERS = 1000
NAMES = [f"layer.{index}" for index in range(PARAMETERS)]
GUARD = gs.Guard()
STEPS, WARM = 6, 1


def announce(lane: SimulatedLane, step: int, **changes: Any) -> HeaderExchange:
    """What the engine does at the end of backward; ranks use different parameters, and weigh differently."""
    rank = lane.groups.rank
    marks = bytearray([Mark.TRAINABLE | Mark.USED] * PARAMETERS)
    marks[rank % PARAMETERS] = Mark.TRAINABLE
    head = Head(step, 77, 1.0 + rank % 7, 1, -1, 1, 0, bytes(8), 0, 0, 77, b"replicas", 8.0, 1)._replace(**changes)
    return HeaderExchange(lane, head, marks)


def judge(lane: SimulatedLane, header: HeaderExchange, health_log: HealthLog) -> Headers:
    """What it does when the header is in: after that every rank does the same with the step."""
    headers = header.receive()
    check_same_call(headers, lane.groups.ranks)
    step_outcome(lane, GUARD, headers, NAMES, health_log)
    return headers


def measure(ranks: int, per_host: int, in_all: int = 0) -> dict[str, Any]:
    """Steps in which nothing is wrong, of so many jobs side by side that there are `in_all` ranks.

    A rank finds its own objects in memory, not in the caches, after thousands of others: a job of eight must not seem
    faster than one of sixteen thousand only because it is alone.
    """
    events = Events()
    networks = [Network(events) for _ in range(max(1, in_all // ranks))]
    everybody = [(network, lane) for network in networks for lane in open_lanes(network, ranks, per_host)]
    logs = [HealthLog(3) for _ in everybody]
    weight = sum(1.0 + rank % 7 for rank in range(ranks))
    python_s: list[list[float]] = []
    gc.collect()
    gc.disable()
    gc.freeze()
    for step in range(WARM + STEPS):
        for network in networks:
            network.begin()
        order = random.Random(step).sample(range(len(everybody)), len(everybody))  # nobody is always the first
        headers = {i: _timed(*everybody[i], announce, step) for i in order}
        events.run()
        for i in order:
            received = _timed(*everybody[i], judge, headers[i], logs[i])
            assert (received.size, received.total_weight, received.used.count(1)) == (ranks, weight, PARAMETERS)
        if step >= WARM:
            python_s.append([network.python_s[lane.groups.rank] for network, lane in everybody])
    gc.unfreeze()
    gc.enable()
    per_rank = [median(each) for each in zip(*python_s, strict=True)]  # of each rank, over the steps
    network, lane = everybody[0]
    messages, nbytes = ([counted[rank] for rank in range(ranks)] for counted in (network.messages, network.nbytes))
    return {
        "ranks": ranks,
        "per_host": per_host,
        "depth": lane.groups.tree.depth,
        "python_ms": {"mean": 1e3 * mean(per_rank), "median": 1e3 * median(per_rank), "most": 1e3 * max(per_rank)},
        "messages": {"mean": mean(messages), "most": max(messages)},
        "nbytes": {"mean": mean(nbytes), "most": max(nbytes)},
        "clock_ms": 1e3 * (network.now - network.begun),
    }


def _timed(network: Network, lane: SimulatedLane, call: Callable[..., Any], *args: Any) -> Any:
    return network.timed(lane.groups.rank, partial(call, lane, *args))


def disagree(ranks: int, per_host: int) -> dict[str, Any]:
    """One rank is a step ahead: all must hear who, in the same words."""
    network = Network()
    lanes = open_lanes(network, ranks, per_host)
    culprit = ranks - 3
    headers = [announce(lane, 5 if lane.groups.rank == culprit else 4) for lane in lanes]
    network.run()  # up, down, and every rank's row to every rank
    whole = sum(len(header.pending.rows) == ranks for header in headers)
    said = set[str]()
    begun = time.perf_counter()
    heard = range(0, ranks, max(1, ranks // 64))  # all rows are everywhere; reading them n times n would take hours
    for rank in heard:
        try:
            judge(lanes[rank], headers[rank], HealthLog(3))
        except gs.Disagreement as error:
            said.add(str(error))
    [sentence] = said
    assert sentence.startswith(f"rank {culprit} is in synchronization 5 and rank 0 in 4"), sentence
    return {
        "ranks": ranks, "whole": whole, "heard": len(heard), "sentence": sentence,
        "read_s": (time.perf_counter() - begun) / len(heard), "clock_ms": 1e3 * network.now,
    }  # fmt: skip
