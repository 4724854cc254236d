"""All-reduces of rising size, timed: the samples from which a link is fitted.

Ranks come to each call together, since the one before let them go together. What a call took is the shortest of the
ranks' times: from when the last of them began to when the first was done; that somebody came late does not count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple, Protocol

import torch

from gradsync.exchange.routes import SharedRoute
from gradsync.probe.probe_group import ProbeGroup
from gradsync.transport.groups import ACROSS_HOSTS, WITHIN_HOST
from gradsync.transport.pending import LaneTask
from gradsync.transport.shared_memory import Team

_FITTED = (64, *(1024 * 4**power for power in range(8)))  # up to 16 MB
_CHECKS = (32 << 10, 512 << 10, 2 << 20, 8 << 20)
_BRIEF = (64, 16 << 10, 256 << 10, 1 << 20, 4 << 20)
_WARM_UP = 5
_SLICE_S = 1.0
_LEAST_SIZES = 4  # so many are measured however slow they are
_LOADED_FROM_NBYTES, _LOAD_NBYTES = 16 << 10, 256 << 10
_PASSES = 4


class Caller(Protocol):
    """Something that reduces tensors among some ranks."""

    what: str
    teams: Sequence[tuple[int, ...]]  # who reduces with whom; ranks in none only wait

    def run(self, nbytes: int, times: int) -> list[float]:
        """Reduce so many bytes so many times, on the lane's thread; the seconds of each."""


class TimedCall(NamedTuple):
    """The time of one call, as all ranks know it."""

    nbytes: int
    seconds: float
    checks: bool


class SweepTime(NamedTuple):
    """The time that a sweep may take, roughly."""

    size_s: float
    whole_s: float
    most: int  # calls of one size

    def times(self, expected_s: float) -> int:
        """
        >>> SweepTime(0.5, 5.0, 30).times(0.1), SweepTime(0.5, 5.0, 30).times(1e-4), SweepTime(0.5, 5.0, 30).times(1.0)
        (5, 30, 3)
        """
        return max(3, min(self.most, math.floor(self.size_s / expected_s + 1e-9)))


FULL, BRIEF = SweepTime(size_s=0.1, whole_s=2.0, most=12), SweepTime(size_s=0.1, whole_s=0.6, most=6)


class BackendSums:
    """The backend's own all-reduce over one of the lane's channels, as buckets use it."""

    def __init__(self, group: ProbeGroup, channel: str, teams: Sequence[tuple[int, ...]], what: str) -> None:
        self.what, self.teams = what, teams
        self._group = group
        self._channel = group.lane.groups.data.get(channel)

    def run(self, nbytes: int, times: int) -> list[float]:
        flat = torch.zeros(nbytes // 4, dtype=torch.float32, device=self._group.wire)
        return [self._reduce(flat) for _ in range(times)]

    def _reduce(self, flat: torch.Tensor) -> float:
        assert self._channel is not None
        begun = time.perf_counter()
        self._channel.sum(flat).wait()  # whoever waits for this thread gives up, and the lane's end ends this
        self._group.settle()
        return time.perf_counter() - begun


class SharedMemorySums:
    """Sums in the memory that the ranks of a host share."""

    what = "the measurement of shared memory"

    def __init__(self, group: ProbeGroup, team: Team, teams: Sequence[tuple[int, ...]]) -> None:
        """Every rank of the group calls this at once."""
        self.teams = teams
        self._route = SharedRoute(group.lane, team)
        sizes = _BRIEF if group.brief else _FITTED
        self._memory = team.allocate(max(sizes)).view(torch.float32)

    def run(self, nbytes: int, times: int) -> list[float]:
        return [self._reduce(self._memory[: nbytes // 4]) for _ in range(times)]

    def _reduce(self, flat: torch.Tensor) -> float:
        pending = self._route.launch(flat, 0)
        while not pending.landed(_SLICE_S):  # ends when a peer dies or gives up
            pass
        pending.settle()
        return pending.finished_at - pending.launched_at


def across(group: ProbeGroup) -> BackendSums:
    """Sums over one rank of each host."""
    firsts = tuple(host[0] for host in group.hosts)
    return BackendSums(group, ACROSS_HOSTS, [firsts], "the measurement of the links between hosts")


def inside(group: ProbeGroup) -> BackendSums:
    """Sums over the ranks of each host, without shared memory."""
    return BackendSums(group, WITHIN_HOST, group.full_hosts, "the measurement of the links inside hosts")


def sweep(group: ProbeGroup, caller: Caller) -> list[TimedCall]:
    """Time calls of rising size, as many as time allows; every rank of the group calls this, all get the same.

    In passes, so that a disturbance does not hit all calls of a size.
    """
    together(group, caller, 64, _WARM_UP)
    timed = [each for _ in range(1 if group.brief else _PASSES) for each in _pass(group, caller)]
    largest = max(each.nbytes for each in timed)  # never kept back: the fit ends with it
    return [each._replace(checks=each.checks and each.nbytes < largest) for each in timed]


def _pass(group: ProbeGroup, caller: Caller) -> list[TimedCall]:
    pace = BRIEF if group.brief else FULL
    timed: list[TimedCall] = []
    known: list[tuple[int, float]] = []  # sizes and their medians
    for nbytes in sorted(_BRIEF) if group.brief else sorted({*_FITTED, *_CHECKS}):
        expected_s = _expected(known, nbytes)
        spent_s = sum(each.seconds for each in timed)
        if len(known) >= _LEAST_SIZES and spent_s + 4 * expected_s > pace.whole_s:
            break
        seconds = together(group, caller, nbytes, pace.times(expected_s))
        timed += [TimedCall(nbytes, each, nbytes in _CHECKS and not group.brief) for each in seconds]
        known.append((nbytes, median(seconds)))
    return timed


def _expected(known: Sequence[tuple[int, float]], nbytes: int) -> float:
    """Seconds of a call, going on as the last two sizes did.

    >>> _expected([(64, 1.0), (1064, 2.0)], 3064), _expected([], 64)
    (4.0, 0.001)
    """
    if len(known) < 2:
        return known[0][1] if known else 1e-3
    (before, before_s), (last, last_s) = known[-2:]
    return last_s + max(0.0, last_s - before_s) / (last - before) * (nbytes - last)


def together(group: ProbeGroup, caller: Caller, nbytes: int, times: int) -> list[float]:
    """Return what each of so many calls took: the shortest time of a team's ranks, in the middle of all teams."""
    group.meet()
    seconds = call(group, caller, nbytes, times) if takes_part(group, caller) else [math.nan] * times
    rows = group.tell(seconds)
    by_team = [[min(rows[rank][call] for rank in team) for call in range(times)] for team in caller.teams]
    return [median(column) for column in zip(*by_team, strict=True)]


def takes_part(group: ProbeGroup, caller: Caller) -> bool:
    return any(group.rank in team for team in caller.teams)


def call(group: ProbeGroup, caller: Caller, nbytes: int, times: int) -> list[float]:
    """Return what so many calls took on this rank."""
    seconds: list[float] = []
    group.lane.wait(start(group, caller, nbytes, times, seconds))
    return seconds


def start(group: ProbeGroup, caller: Caller, nbytes: int, times: int, seconds: list[float]) -> LaneTask:
    """Have the lane's thread make these calls, and put down what each took.

    Before them goes a load that is not timed: the first call is never like the others, and where a token bucket lets
    a burst through, what counts is how fast bytes move when others went before.
    """
    load = max(nbytes, _LOAD_NBYTES) if nbytes >= _LOADED_FROM_NBYTES else nbytes

    def run() -> None:
        caller.run(load, 1)
        seconds.extend(caller.run(nbytes, times))

    return group.lane.send(run, caller.what, 0)
