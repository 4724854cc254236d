"""A network in one process, with a clock of its own: channels of subgroups, which the control code uses as gloo's.

What runs on it is gradsync's own: `Lane`, `TreeExchange`, `HeaderExchange` and what judges a step. Only gloo is
replaced, by events on a queue: a message arrives a latency after it was sent, and the queue's clock jumps to it.
"""

from __future__ import annotations

import heapq
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

import gradsync as gs
from gradsync.algorithms.control_tree import ControlTree, Subgroup
from gradsync.transport.gloo_channel import GlooChannel
from gradsync.transport.groups import Groups
from gradsync.transport.heartbeat import INITIAL
from gradsync.transport.lane import Lane

LATENCY_S = 30e-6


class Events:
    """What will happen, in the order of its time; several jobs may share it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._open: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, moment: float, happen: Callable[[], None]) -> None:
        """Have this happen then."""
        heapq.heappush(self._open, (moment, next(self._numbers), happen))

    def run(self) -> None:
        """Until nothing is under way."""
        while self._open:
            self.now, _, happen = heapq.heappop(self._open)
            happen()


class Network:
    """One job's: what each rank has sent and computed."""

    def __init__(self, events: Events | None = None) -> None:
        self.events = Events() if events is None else events
        self.begun = 0.0
        self.messages: Counter[int] = Counter()  # sent, by rank
        self.nbytes: Counter[int] = Counter()
        self.python_s: Counter[int] = Counter()  # by rank, in the control code
        self.calls: Counter[int] = Counter()  # of functions, Python's and C's, where `count_calls` is set
        self.count_calls = False
        self._simulating_s = 0.0  # in what stands for gloo: no rank's time
        self._paused_s = 0.0
        self._hear: Any = None

    @property
    def now(self) -> float:
        return self.events.now

    def begin(self) -> None:
        """Count from here on."""
        self.begun = self.now
        for counted in (self.messages, self.nbytes, self.python_s, self.calls):
            counted.clear()

    def at(self, moment: float, happen: Callable[[], None]) -> None:
        """Have this happen then."""
        self.events.at(moment, happen)

    def run(self) -> None:
        """Until nothing is under way."""
        self.events.run()

    def send(self, source: int, nbytes: int, hops: int = 1) -> float:
        """A message leaves; when it arrives."""
        self.messages[source] += 1
        self.nbytes[source] += nbytes
        return self.now + hops * LATENCY_S

    def timed(self, rank: int, call: Callable[[], Any]) -> Any:
        """What the call returns; the processor time it takes is that rank's, and what it calls."""
        if self.count_calls:
            return self._counted(rank, call)
        begun, aside_s = time.thread_time(), self._simulating_s
        try:
            return call()
        finally:
            self.python_s[rank] += time.thread_time() - begun - (self._simulating_s - aside_s)

    def _counted(self, rank: int, call: Callable[[], Any]) -> Any:
        def hear(_: object, event: str, __: object) -> None:
            if event in ("call", "c_call"):
                self.calls[rank] += 1

        sys.setprofile(hear)
        try:
            return call()
        finally:
            sys.setprofile(None)

    def pause(self) -> None:
        """What happens until `resume` would happen in gloo, and costs no rank any Python."""
        self._hear = sys.getprofile()
        sys.setprofile(None)
        self._paused_s = time.thread_time()

    def resume(self) -> None:
        """A rank goes on."""
        self._simulating_s += time.thread_time() - self._paused_s
        sys.setprofile(self._hear)


class Work:
    """One rank's part in a collective, as torch's works are."""

    def __init__(self, network: Network, rank: int) -> None:
        self._network, self._rank = network, rank
        self._callbacks: list[Callable[[Any], None]] = []
        self._done = False

    def get_future(self) -> Work:
        return self

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self._done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def value(self) -> None: ...

    def wait(self) -> None: ...

    def end(self) -> None:
        """It is over for this rank."""
        self._done = True
        for callback in self._callbacks:
            self._network.timed(self._rank, lambda callback=callback: callback(self))


class SharedSubgroup:
    """What the members of one subgroup bring to its collectives, by number."""

    def __init__(self, network: Network, subgroup: Subgroup) -> None:
        self.network, self.subgroup = network, subgroup
        self.collected: dict[int, dict[int, Any]] = {}
        self.told: dict[int, dict[int, Any]] = {}


class SimulatedGloo:
    """One member's end of a subgroup, in the place of torch's backend: below gradsync's own `GlooChannel`."""

    def __init__(self, shared: SharedSubgroup, rank: int) -> None:
        self._shared, self._rank = shared, rank
        self._place = shared.subgroup.members.index(rank)
        self._num_collected = self._num_told = 0

    def gather(self, rows: list[list[torch.Tensor]], mine: list[torch.Tensor], options: Any) -> Work:
        """The first member's `rows` get every member's."""
        network, members, [row] = self._shared.network, self._shared.subgroup.members, mine
        network.pause()
        call = self._shared.collected.setdefault(self._num_collected, {"here": 0, "rows": {}})
        self._num_collected += 1
        work = Work(network, self._rank)
        call["rows"][self._place] = row
        if self._place == options.rootRank:
            [call["into"]], call["work"] = rows, work

        def arrive() -> None:
            call["here"] += 1
            if call["here"] == len(members):
                for place, into in enumerate(call["into"]):
                    into.copy_(call["rows"][place])
                call["work"].end()

        if self._place == options.rootRank:
            network.at(network.now, arrive)
        else:
            network.at(network.send(self._rank, row.numel()), arrive)
            network.at(network.now, work.end)
        network.resume()
        return work

    def allgather(self, rows: list[list[torch.Tensor]], mine: list[torch.Tensor], _: Any) -> Work:
        """Every member's row to every member, in a ring as gloo does it."""
        network, members, [row] = self._shared.network, self._shared.subgroup.members, mine
        network.pause()
        call = self._shared.collected.setdefault(self._num_collected, {"ends": [], "rows": {}})
        self._num_collected += 1
        work = Work(network, self._rank)
        call["rows"][self._place] = row
        call["ends"].append((work, rows[0]))
        network.messages[self._rank] += len(members) - 1
        network.nbytes[self._rank] += (len(members) - 1) * row.numel()
        if len(call["ends"]) == len(members):
            for each, into in call["ends"]:
                for place, one in enumerate(into):
                    one.copy_(call["rows"][place])
                network.at(network.now + (len(members) - 1) * LATENCY_S, each.end)
        network.resume()
        return work

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Work:
        """From the first member by a binomial tree, as gloo does it."""
        assert options.rootRank == 0
        network, members, [tensor] = self._shared.network, self._shared.subgroup.members, tensors
        network.pause()
        call = self._shared.told.setdefault(self._num_told, {"waiting": {}, "data": None})
        self._num_told += 1
        work = Work(network, self._rank)

        def come(place: int, into: torch.Tensor, work: Work) -> None:
            def arrive() -> None:
                into.set_(call["data"])  # what all have is held once: all rows on all ranks would be terabytes
                work.end()

            network.at(call["sent"] + place.bit_length() * LATENCY_S, arrive)

        if self._place == 0:
            call["data"], call["sent"] = tensor, network.now
            for place in range(1, len(members)):  # who passes it on: the place without its highest bit
                network.send(members[place - (1 << (place.bit_length() - 1))], tensor.numel())
            for place, (into, waiting) in call["waiting"].items():
                come(place, into, waiting)
            network.at(network.now, work.end)
        elif call["data"] is not None:
            come(self._place, tensor, work)
        else:
            call["waiting"][self._place] = (tensor, work)
        network.resume()
        return work


class Suspended(Exception):
    """A rank would wait here: it goes on when the network has run."""


class SimulatedLane(Lane):
    """gradsync's own lane, which never blocks: where it would, the simulation goes on with the next rank."""

    def __init__(self, network: Network, groups: Groups) -> None:
        super().__init__(groups, _LIVENESS, gs.Guard(), 60.0)
        self.network = network
        self._merging: dict[bytes, Any] | None = None  # by row, where a call that was suspended is made again

    def wait(self, pending: Any, timeout: float | None = None) -> None:
        if not pending.landed(0):
            raise Suspended
        pending.settle()

    def resume_calls(self) -> None:
        """A call that is made again gets what it asked for the first time."""
        self._merging = {}

    def merge_all(self, row: torch.Tensor, merge: Any, what: str, ask: Any = None) -> Any:
        if self._merging is None:
            return super().merge_all(row, merge, what, ask)
        asked = bytes(row.numpy())
        if asked not in self._merging:
            self._merging[asked] = super().merge_all(row, merge, what, ask)
        return self._merging[asked]


_LIVENESS: Any = SimpleNamespace(
    heartbeat=SimpleNamespace(state=INITIAL, at=lambda *_: None),
    each_tick=lambda look: None,
    orphan=lambda *_: None,
    close=lambda: None,
    hosts=(),
    state=INITIAL,
    watch=lambda _: None,
)


def hosts_of(ranks: int, per_host: int) -> tuple[tuple[int, ...], ...]:
    """Ranks in order, so many on a host."""
    return tuple(tuple(range(at, min(at + per_host, ranks))) for at in range(0, ranks, per_host))


def open_lanes(network: Network, ranks: int, per_host: int, whom: Sequence[int] | None = None) -> list[SimulatedLane]:
    """Every rank's lane over one tree."""
    tree = ControlTree(hosts_of(ranks, per_host))
    shared = {subgroup: SharedSubgroup(network, subgroup) for level in tree.levels for subgroup in level}
    everybody = tuple(range(ranks))
    lanes = []
    for rank in whom or everybody:
        ends = [SimulatedGloo(shared[subgroup], rank) for subgroup in tree.climb(rank)]
        subgroups = [(subgroup, GlooChannel(end)) for subgroup, end in zip(tree.climb(rank), ends, strict=True)]
        groups = Groups(rank, ranks, everybody, tree=tree, subgroups=subgroups)
        if tree.is_small:
            groups.first = subgroups[0][1]
        lanes.append(SimulatedLane(network, groups))
    return lanes
