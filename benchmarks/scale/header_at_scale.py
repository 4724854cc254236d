"""A step's header among simulated ranks: what it costs each, and what is said when one is out of step."""

from __future__ import annotations

import gc
import time
from statistics import mean, median
from typing import Any

from simulated import Network, SimulatedLane, Suspended, open_lanes

import gradsync as gs
from gradsync.agreement.calls import check_same_call
from gradsync.agreement.header import Head, Headers, Mark
from gradsync.agreement.header_exchange import HeaderExchange
from gradsync.agreement.outcome import HealthLog, step_outcome

PARAMETERS = 1000
NAMES = [f"layer.{index}" for index in range(PARAMETERS)]
GUARD = gs.Guard()
STEPS, WARM = 12, 3


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


def measure(ranks: int, per_host: int) -> dict[str, Any]:
    """Steps in which nothing is wrong."""
    network = Network()
    lanes = open_lanes(network, ranks, per_host)
    logs = [HealthLog(3) for _ in lanes]
    python_s: list[list[float]] = []
    clock_s = []
    gc.collect()
    gc.freeze()  # thousands of ranks' objects are not this rank's affair
    weight = sum(1.0 + rank % 7 for rank in range(ranks))
    for step in range(WARM + STEPS):
        network.python_s.clear()
        network.messages.clear()
        network.nbytes.clear()
        begun = network.now
        headers = [network.timed(r, lambda lane=lane: announce(lane, step)) for r, lane in enumerate(lanes)]
        network.run()
        clock_s.append(network.now - begun)
        for r, (lane, header) in enumerate(zip(lanes, headers, strict=True)):
            received = network.timed(r, lambda lane=lane, header=header, r=r: judge(lane, header, logs[r]))
            assert (received.size, received.total_weight, received.used.count(1)) == (ranks, weight, PARAMETERS)
        if step >= WARM:
            python_s.append([network.python_s[rank] for rank in range(ranks)])
    gc.unfreeze()
    per_rank = [median(each) for each in zip(*python_s, strict=True)]  # of each rank, over the steps
    return {
        "ranks": ranks,
        "per_host": per_host,
        "depth": lanes[0].groups.tree.depth,
        "python_ms": {"mean": 1e3 * mean(per_rank), "median": 1e3 * median(per_rank), "most": 1e3 * max(per_rank)},
        "messages": {"mean": mean(network.messages[r] for r in range(ranks)), "most": max(network.messages.values())},
        "nbytes": {"mean": mean(network.nbytes[r] for r in range(ranks)), "most": max(network.nbytes.values())},
        "clock_ms": 1e3 * median(clock_s),
    }


def disagree(ranks: int, per_host: int) -> dict[str, Any]:
    """One rank is a step ahead: all must hear who, in the same words."""
    network = Network()
    lanes = open_lanes(network, ranks, per_host)
    culprit = ranks - 3
    headers = [announce(lane, 5 if lane.groups.rank == culprit else 4) for lane in lanes]
    network.run()
    suspended = 0
    for lane, header in zip(lanes, headers, strict=True):
        try:
            judge(lane, header, HealthLog(3))
        except (Suspended, gs.Disagreement) as error:
            suspended += isinstance(error, Suspended)
    network.run()  # every rank's row goes to every rank
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
        "ranks": ranks, "asked": suspended, "heard": len(heard), "sentence": sentence,
        "read_s": (time.perf_counter() - begun) / len(heard), "clock_ms": 1e3 * network.now,
    }  # fmt: skip
