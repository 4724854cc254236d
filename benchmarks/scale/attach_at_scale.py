"""How many ranks meet, simulated: rounds through the store, requests and bytes; and what they compare then.

A channel of a subgroup is made by gloo, which asks the store too: it sets its address, and then gets that of each
member in turn, itself included, looking twice whether it is there (seen of torch 2.13, through `PolledStore`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import chain
from statistics import mean
from typing import Any

import gradsync as gs
from gradsync.agreement.attach_check import check_attach
from gradsync.algorithms.control_tree import ControlTree
from scale.simulated import Network, Suspended, open_lanes
from simulated_store import SimulatedMeeting

ADDRESS = bytes(178)  # what gloo says of itself


class SimulatedAttach(SimulatedMeeting):
    """All ranks meet, and each then makes the channels of its subgroups, the lower one first."""

    def __init__(self, hosts: list[str]) -> None:
        super().__init__(hosts)
        self._steps = {rank: chain(steps, self._channels(rank)) for rank, steps in self._steps.items()}

    @cached_property
    def tree(self) -> ControlTree:
        """All build the same one: it is made once."""
        return ControlTree(self.hosts())

    def _channels(self, rank: int) -> Iterator[None]:
        store = self.clients[rank]
        store.add(f"made/{rank}", 1)
        assert self.found[rank].map.hosts
        for subgroup in self.tree.climb(rank):
            keys = [f"subgroup-{subgroup.level}-{subgroup.leader}/{member}" for member in subgroup.members]
            store.set(keys[subgroup.members.index(rank)], ADDRESS)
            for key in keys:
                while not store.check([key]):
                    yield
                store.check([key])
                store.multi_get([key])


def meet(ranks: int, per_host: int) -> dict[str, Any]:
    """All come, and make their channels; then the same with one rank that never comes."""
    hosts = [f"h{rank // per_host}" for rank in range(ranks)]
    to_meet = SimulatedMeeting(hosts).run().rounds
    meeting = SimulatedAttach(hosts).run()
    assert len(meeting.hosts()) == -(-ranks // per_host)
    requests = list(meeting.requests().values())
    nbytes = [client.nbytes for client in meeting.clients.values()]
    return {
        "ranks": ranks,
        "per_host": per_host,
        "rounds": {"to meet": to_meet, "with channels": meeting.rounds},
        "requests": {"mean": mean(requests), "most": max(requests), "all": sum(requests)},
        "nbytes": {"mean": mean(nbytes), "most": max(nbytes)},
        "absent": _absence(hosts),
    }


def _absence(hosts: list[str]) -> dict[str, Any]:
    missing = len(hosts) - 2
    meeting = SimulatedMeeting(hosts, absent=[missing], patience=60.0)
    while meeting.waiting and meeting.clock.now < 120:
        meeting.turn(seconds=1.0)
    named = [error for error in meeting.errors.values() if getattr(error, "ranks", None) == (missing,)]
    assert len(named) == len(hosts) - 1, f"{len(named)} of {len(hosts) - 1} ranks named rank {missing}"
    return {"named_by": len(named), "after_s": meeting.clock.now, "sentence": str(named[0])}


def agree(ranks: int, per_host: int, parameters: int = 1000) -> dict[str, Any]:
    """Names, shapes and plan of all, compared through the tree: messages that a rank sends for it."""
    network = Network()
    lanes = open_lanes(network, ranks, per_host)
    table = [{"name": f"layer.{index}", "shape": [512, 512], "dtype": "float32"} for index in range(parameters)]
    network.begin()
    for lane in lanes:
        lane.resume_calls()
        _until(lambda lane=lane: check_attach(lane, table, gs.Plan().canonical(), None))
    network.run()
    for lane in lanes:
        assert _until(lambda lane=lane: check_attach(lane, table, gs.Plan().canonical(), None))
    messages = [network.messages[rank] for rank in range(ranks)]
    nbytes = [network.nbytes[rank] for rank in range(ranks)]
    return {"ranks": ranks, "messages": mean(messages), "nbytes": mean(nbytes), "clock_ms": 1e3 * network.now}


def _until(call: Any) -> bool:
    try:
        call()
    except Suspended:
        return False
    return True
