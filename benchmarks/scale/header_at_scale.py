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
    python_s: list[list[float]] = []
    gc.collect()
    gc.disable()
    gc.freeze()
    for step in range(WARM + STEPS):
        _step(step, everybody, logs, ranks)
        if step >= WARM:
            python_s.append([network.python_s[lane.groups.rank] for network, lane in everybody])
    gc.unfreeze()
    gc.enable()
    per_rank = [1e3 * median(each) for each in zip(*python_s, strict=True)]  # of each rank, over the steps
    jobs = [per_rank[at : at + ranks] for at in range(0, len(per_rank), ranks)]
    return {
        "ranks": ranks,
        "per_host": per_host,
        "depth": everybody[0][1].groups.tree.depth,
        "python_ms": {"mean": mean(per_rank), "median": median(per_rank), "most": median(map(max, jobs))},
        **count(ranks, per_host),
    }


def count(ranks: int, per_host: int) -> dict[str, Any]:
    """What does not depend on the machine: messages, bytes, calls of functions, and the clock of the network."""
    network = Network()
    network.count_calls = True
    lanes = open_lanes(network, ranks, per_host)
    gc.disable()  # what hears of collections, as hypothesis does, would be counted with whichever rank they fall upon
    try:
        for step in (0, 1):  # in the first one a rank makes what it keeps
            _step(step, [(network, lane) for lane in lanes], [HealthLog(3) for _ in lanes], ranks)
    finally:
        gc.enable()
    counted = {"messages": network.messages, "nbytes": network.nbytes, "calls": network.calls}
    found: dict[str, Any] = {"clock_ms": 1e3 * (network.now - network.begun)}
    for name, counter in counted.items():
        each = [counter[rank] for rank in range(ranks)]
        found[name] = {"mean": mean(each), "median": median(each), "most": max(each)}
    return found


def _step(step: int, everybody: list[tuple[Network, SimulatedLane]], logs: list[HealthLog], ranks: int) -> None:
    for network in {id(network): network for network, _ in everybody}.values():
        network.begin()
    weight = sum(1.0 + rank % 7 for rank in range(ranks))
    order = random.Random(step).sample(range(len(everybody)), len(everybody))  # nobody is always the first
    headers = {at: _timed(*everybody[at], announce, step) for at in order}
    everybody[0][0].run()
    for at in order:
        received = _timed(*everybody[at], judge, headers[at], logs[at])
        assert (received.size, received.total_weight, received.used.count(1)) == (ranks, weight, PARAMETERS)


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
