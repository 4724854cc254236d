"""All-reduces of rising size, timed: the samples from which a link is fitted.

Ranks come to each call together, since the one before let them go together. What a call took is the shortest of the
ranks' times: from when the last of them began to when the first was done; that somebody came late does not count.

Over NCCL calls follow each other on a stream, as buckets do, and the GPU's own clock is read: neither the host's way to
the GPU nor its waiting counts. Several calls make one sample because of ranks that take turns on a GPU: in its turn a
rank ends one call and begins the next, so of two calls one seems to take no time.

    stream    │ not timed │ call call call call │ call call call call │ …
              event ──────▲── a sample, by 4 ───▲─────────────────────▲
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple, Protocol

import torch

from gradsync.exchange.routes import SharedRoute
from gradsync.probe.gpu_stream import moment, pause, seconds_between
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
_MOST_NBYTES = 64 << 20
_SETTLED = 0.03  # what the rate may still change by when messages become twice as large
# On a stream, calls that make one sample: of sizes up to so many bytes so many.
_ISSUE_S = 100e-6  # a call, by the host, at most
_IN_A_SAMPLE = ((64 << 10, 16), (256 << 10, 8), (1 << 20, 4), (8 << 20, 2))


class Caller(Protocol):
    """Something that reduces tensors among some ranks."""

    what: str
    teams: Sequence[tuple[int, ...]]  # who reduces with whom; ranks in none only wait
    most_nbytes: int  # that it can reduce

    def calls_of(self, nbytes: int) -> int:
        """The number of calls of this size that make one sample."""

    def run(self, nbytes: int, times: int) -> list[float]:
        """Take so many samples of reducing so many bytes, on the lane's thread; the seconds of a call in each."""

    def run_beside(self, nbytes: int, times: int, issue: Callable[[], None]) -> float:
        """Seconds of what `issue` gives to a GPU while it reduces so often; on the lane's thread."""


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
        >>> SweepTime(0.5, 5.0, 30).times(0.0)
        30
        """
        # By a GPU's clock a call may seem to take no time.
        return max(3, min(self.most, math.floor(self.size_s / max(expected_s, 1e-9) + 1e-9)))


FULL, BRIEF = SweepTime(size_s=0.1, whole_s=2.0, most=12), SweepTime(size_s=0.1, whole_s=0.6, most=6)


class BackendSums:
    """The backend's own all-reduce over one of the lane's channels, as buckets use it."""

    most_nbytes = _MOST_NBYTES

    def __init__(self, group: ProbeGroup, channel: str, teams: Sequence[tuple[int, ...]], what: str) -> None:
        self.what, self.teams = what, teams
        self._group = group
        self._channel = group.lane.groups.data.get(channel)

    @property
    def _on_stream(self) -> bool:
        return self._group.wire.type == "cuda"

    def calls_of(self, nbytes: int) -> int:
        return calls_in_a_sample(nbytes) if self._on_stream else 1

    def run(self, nbytes: int, times: int) -> list[float]:
        flat = torch.zeros(nbytes // 4, dtype=torch.float32, device=self._group.wire)
        if self._on_stream:
            return self._reduce_on_stream(flat, times)
        return [self._reduce(flat) for _ in range(times)]

    def _reduce(self, flat: torch.Tensor) -> float:
        assert self._channel is not None
        begun = time.perf_counter()
        self._channel.sum(flat).wait()  # whoever waits for this thread gives up, and the lane's end ends this
        return time.perf_counter() - begun

    def _reduce_on_stream(self, flat: torch.Tensor, times: int) -> list[float]:
        assert self._channel is not None
        calls = self.calls_of(flat.nbytes)
        with torch.cuda.device(flat.device):
            pause(times * calls * _ISSUE_S)
            self._channel.sum(flat).wait()  # the stream waits, the host does not
            moments = [moment()]
            for _ in range(times):
                for _ in range(calls):
                    self._channel.sum(flat).wait()
                moments.append(moment())
            return [seconds / calls for seconds in seconds_between(moments)]

    def run_beside(self, nbytes: int, times: int, issue: Callable[[], None]) -> float:
        assert self._channel is not None
        flat = torch.zeros(nbytes // 4, dtype=torch.float32, device=self._group.wire)
        with torch.cuda.device(self._group.device):
            pause(times * _ISSUE_S)
            begun = [self._channel.sum(flat) for _ in range(times)]
            moments = [moment()]
            issue()
            moments.append(moment())
            for work in begun:
                work.wait()
            self._group.settle()
            return seconds_between(moments)[0]


def calls_in_a_sample(nbytes: int) -> int:
    """
    >>> calls_in_a_sample(64), calls_in_a_sample(1 << 20), calls_in_a_sample(64 << 20)
    (16, 4, 1)
    """
    return next((calls for most, calls in _IN_A_SAMPLE if nbytes <= most), 1)


class SharedMemorySums:
    """Sums in the memory that the ranks of a host share."""

    what = "the measurement of shared memory"

    def __init__(self, group: ProbeGroup, team: Team, teams: Sequence[tuple[int, ...]]) -> None:
        """Every rank of the group calls this at once."""
        self.teams = teams
        self._route = SharedRoute(group.lane, team)
        self.most_nbytes = max(_BRIEF if group.brief else _FITTED)
        self._memory = team.allocate(self.most_nbytes).view(torch.float32)

    def calls_of(self, nbytes: int) -> int:
        return 1

    def run_beside(self, nbytes: int, times: int, issue: Callable[[], None]) -> float:
        raise NotImplementedError("what ranks share in memory is the host's, never a GPU's")

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

    In passes, so that a disturbance does not hit all calls of a size. Sizes go on rising until the rate has settled:
    what leaves at once, by a burst that a link allows or while a GPU serves another rank, counts for less and less.
    """
    together(group, caller, 64, _WARM_UP)
    timed = [each for _ in range(1 if group.brief else _PASSES) for each in _pass(group, caller)]
    largest = max(each.nbytes for each in timed)  # never kept back: the fit ends with it
    return [each._replace(checks=each.checks and each.nbytes < largest) for each in timed]


def _pass(group: ProbeGroup, caller: Caller) -> list[TimedCall]:
    pace = BRIEF if group.brief else FULL
    timed: list[TimedCall] = []
    known: list[tuple[int, float]] = []  # sizes and their medians
    planned, spent_s = sorted(_BRIEF) if group.brief else sorted({*_FITTED, *_CHECKS}), 0.0
    for nbytes in [*planned, *_doubled(planned[-1], caller.most_nbytes)]:
        expected_s, calls = _expected(known, nbytes), caller.calls_of(nbytes)
        if len(known) >= _LEAST_SIZES and spent_s + 4 * calls * expected_s > pace.whole_s:
            break
        if nbytes > planned[-1] and settled(known):
            break
        seconds = together(group, caller, nbytes, pace.times(calls * expected_s))
        spent_s += calls * sum(seconds)
        timed += [TimedCall(nbytes, each, nbytes in _CHECKS and not group.brief) for each in seconds]
        known.append((nbytes, median(seconds)))
    return timed


def _doubled(nbytes: int, most: int) -> Iterator[int]:
    while 2 * nbytes <= most:
        nbytes *= 2
        yield nbytes


def settled(known: Sequence[tuple[int, float]]) -> bool:
    """True if larger messages would hardly be faster or slower, by the byte beyond the first size.

    What is wrong at a size by a share is wrong by half of it at twice the size; so when a doubling changes little,
    about as little is still wrong.

    >>> rate, burst = 1e9, 1e6
    >>> times = [(64, 1e-4), *((size, 1e-4 + max(0.0, size - burst) / rate) for size in (4e6, 8e6, 16e6, 32e6, 64e6))]
    >>> [settled(times[:count]) for count in (2, 3, 4, 5, 6)]
    [False, False, False, False, True]
    """
    if len(known) < 3:
        return False
    (_, first_s), *_, (before, before_s), (last, last_s) = known
    if min(before_s, last_s) <= first_s:
        return False
    factor = last / (last_s - first_s) / (before / (before_s - first_s))
    return abs(factor - 1) < _SETTLED * max(1.0, math.log2(last / before))


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
