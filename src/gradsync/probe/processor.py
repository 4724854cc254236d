"""Something to compute, in equal portions, and what its times tell of a rank's processor.

What moving bytes takes from a processor that has gradients to compute.

Two ways to see it, and the larger one counts:

    the cores' time   what this process used while it only communicated
    the slowdown      how much less it computes while it communicates: interrupts, caches, a core shared

On a GPU there is the second one only, by the GPU's clock.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean, median
from typing import NamedTuple

import torch

from gradsync.probe.all_reduce_times import Caller, call, start, takes_part
from gradsync.probe.gpu_stream import stream_seconds
from gradsync.probe.probe_group import ProbeGroup

_BURST_S = 0.01
_SPELL_S, _BRIEF_SPELL_S = 0.5, 0.2
_WHOLE_CORE = 0.9
_SLOW_RANK = 1.15
_UNSTEADY = 0.1
_COPY_NBYTES, _BRIEF_COPY_NBYTES = 64 << 20, 16 << 20
_GPU_COPY_NBYTES = 256 << 20  # more than a GPU keeps in its caches
_SIDE = {"cpu": 192, "cuda": 2048}  # three such matrices fit into a core's cache; on a GPU they fill it


class ProcessorTimes(NamedTuple):
    """The speed of what computes on a rank, measured while every rank is busy."""

    cores: float
    jitter: float
    memory_bandwidth: float
    medians: tuple[float, ...]  # seconds of a burst, by rank


class ComputeLoad:
    """Matrix products; a burst is some ten milliseconds of them, the same number on every rank."""

    def __init__(self, group: ProbeGroup, portions: int | None = None) -> None:
        """Every rank of the group calls this at once; `portions` make a burst, None: as many as take that long."""
        side = _SIDE[group.device.type]
        self._group = group
        # A generator of its own: what the user's model draws next must not depend on whether anybody measured.
        generator = torch.Generator(group.device).manual_seed(0)
        self._operands = [
            torch.rand(side, side, generator=generator, dtype=torch.float32, device=group.device) for _ in range(2)
        ]
        self._out = torch.empty_like(self._operands[0])
        self.portion()
        self.portions = portions or self._calibrate()

    def _calibrate(self) -> int:
        portion_s = median(_timed(self.portion) for _ in range(20))
        return max(1, round(_BURST_S / median(self._group.tell_one(portion_s))))

    def portion(self) -> None:
        torch.mm(*self._operands, out=self._out)
        self._group.settle()

    def issue(self) -> None:
        """Have a GPU compute a burst, and do not wait for it."""
        for _ in range(self.portions):
            torch.mm(*self._operands, out=self._out)

    def burst(self) -> None:
        for _ in range(self.portions):
            self.portion()

    def flops(self) -> float:
        """Operations per second in products of such matrices: the most that this rank could do."""
        portion_s = min(_timed(self.portion, time.perf_counter) for _ in range(20))
        return 2 * self._out.shape[0] ** 3 / portion_s

    def rate(self, going: Callable[[], bool]) -> float:
        """Portions per second, while `going()`."""
        begun, count = time.perf_counter(), 0
        while going():
            self.portion()
            count += 1
        return count / (time.perf_counter() - begun)

    def rate_for(self, seconds: float) -> float:
        deadline = time.perf_counter() + seconds
        return self.rate(lambda: time.perf_counter() < deadline)


def examine(group: ProbeGroup, compute: ComputeLoad) -> ProcessorTimes:
    """Cores, jitter and memory of the ranks; every rank of the group calls this, all get the same."""
    cores = _cores(group)
    # Where ranks take turns on the cores, who waits in one burst has the core in the next: that is no jitter.
    clock = time.thread_time if cores < _WHOLE_CORE else time.perf_counter
    group.meet()
    bursts = group.tell([_timed(compute.burst, clock) for _ in range(20 if group.brief else 60)])
    medians = tuple(median(row) for row in bursts)
    return ProcessorTimes(cores, jitter_of(bursts), _copy_bandwidth(group), medians)


def slow_rank_warnings(processor: ProcessorTimes, name_of: Callable[[int], str]) -> list[str]:
    """A sentence for each rank that is slower than the others, and one if all are restless.

    >>> slow_rank_warnings(ProcessorTimes(1.0, 0.01, 1e10, (0.010, 0.010, 0.013)), "rank {} on host b".format)
    ['rank 2 on host b computes 1.3 times as slowly as the others']
    """
    said = []
    for rank, seconds in enumerate(processor.medians):
        others = median(each for other, each in enumerate(processor.medians) if other != rank)
        if seconds > _SLOW_RANK * others:
            said.append(f"{name_of(rank)} computes {seconds / others:.1f} times as slowly as the others")
    if processor.jitter > _UNSTEADY:
        said.append(
            f"equal computations take unequally long, by {100 * processor.jitter:.0f} %: something else runs here, "
            "or the processor changes its pace"
        )
    return said


def jitter_of(bursts: Sequence[Sequence[float]]) -> float:
    """The relative standard deviation of all ranks' bursts, each by its own rank's median.

    As a normal distribution has it whose middle two thirds are as wide: one burst that took ten times as long says
    little of a step, which is longer than a burst.

    >>> jitter_of([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]), round(jitter_of([[0.8, 0.9, 1.0, 1.0, 1.1, 1.2]]), 3)
    (0.0, 0.1)
    """
    relative = sorted(seconds / median(row) for row in bursts for seconds in row)
    last = len(relative) - 1
    return (relative[round(0.84 * last)] - relative[round(0.16 * last)]) / 2


def _cores(group: ProbeGroup) -> float:
    """Return how many cores a rank gets if it asks for two while all ranks do; a GPU counts as one."""
    if group.device.type == "cuda":
        return 1.0
    return min(2.0, mean(group.tell_one(_two_threads_cores(group))))


def _two_threads_cores(group: ProbeGroup) -> float:
    """The cores' time that two busy threads of this rank get, by the second."""
    loads = [ComputeLoad(group, portions=1) for _ in range(2)]
    group.meet()
    deadline = time.perf_counter() + (_BRIEF_SPELL_S if group.brief else _SPELL_S)

    def work(compute: ComputeLoad) -> None:
        torch.get_num_threads()  # a thread that torch did not start heeds set_num_threads() once it has asked
        while time.perf_counter() < deadline:
            compute.burst()

    threads = [threading.Thread(target=work, args=(each,), name="gradsync-probe") for each in loads]
    begun, used = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.process_time() - used) / (time.perf_counter() - begun)


def _copy_bandwidth(group: ProbeGroup) -> float:
    """Bytes per second, read and written, in copies that all ranks make at once."""
    on_gpu = group.device.type == "cuda"
    nbytes = _GPU_COPY_NBYTES if on_gpu else _BRIEF_COPY_NBYTES if group.brief else _COPY_NBYTES
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=group.device) for _ in range(2))

    def copy(step: int = 0) -> None:
        target.copy_(source)

    copy()
    group.meet()
    if on_gpu:
        _, (copy_s,) = stream_seconds(group.device, lambda: None, [copy], steps=5)
        return 2 * nbytes / median(group.tell_one(copy_s))
    return 2 * nbytes / median(group.tell_one(median(_timed(copy) for _ in range(3 if group.brief else 7))))


def _timed(work: Callable[[], None], clock: Callable[[], float] = time.perf_counter) -> float:
    begun = clock()
    work()
    return clock() - begun


_SHARE_S, _BRIEF_SHARE_S = 0.4, 0.12
_TRIAL_CALLS, _MOST_CALLS = 2, 500
_BOUND_S = 30.0  # then somebody looks after the peers


def processor_share(group: ProbeGroup, compute: ComputeLoad, caller: Caller, nbytes: int, call_s: float) -> float:
    """The share of a core that calls of this size keep busy, from 0 to 1; every rank calls this, all get the same."""
    if group.device.type == "cuda":
        # Over gloo bytes of a GPU keep the host busy, of which its computation needs little.
        return _share_of_gpu(group, compute, caller, nbytes, call_s) if group.wire.type == "cuda" else 0.0
    spell_s = _BRIEF_SHARE_S if group.brief else _SHARE_S
    busy = takes_part(group, caller)
    group.meet()
    used = _core_share(group, caller, nbytes, _times(spell_s, call_s)) if busy else 0.0
    # Beside computation calls take longer; how long is not known before.
    trial = _overlapped(group, compute, caller, nbytes, _TRIAL_CALLS) if busy else _OverlappedCalls(0.0, 0.0)
    beside_s = max(group.tell_one(trial.call_s))
    before = compute.rate_for(spell_s / 2)
    group.meet()
    beside = (
        _overlapped(group, compute, caller, nbytes, _times(spell_s, beside_s)).rate
        if busy
        else compute.rate_for(spell_s)
    )
    group.meet()
    after = compute.rate_for(spell_s / 2)
    told = group.tell([used, _slowdown(before, beside, after)])
    shares = [max(told[rank]) for team in caller.teams for rank in team]
    return min(1.0, max(0.0, median(shares)))


def _share_of_gpu(group: ProbeGroup, compute: ComputeLoad, caller: Caller, nbytes: int, call_s: float) -> float:
    """The share by which products of matrices take longer on a GPU while calls go on beside them."""
    group.meet()
    _, (alone_s,) = stream_seconds(group.device, lambda: None, [lambda step: compute.issue()], steps=3)
    # More calls than last as long, since those take longer too.
    times = math.ceil(3 * max(group.tell_one(alone_s)) / max(call_s, 1e-6))
    group.meet()
    taken: list[float] = []
    if takes_part(group, caller):
        run = partial(caller.run_beside, nbytes, min(_MOST_CALLS, max(_TRIAL_CALLS, times)), compute.issue)
        group.lane.wait(group.lane.send(lambda: taken.append(run()), caller.what, 0))
    else:
        _, taken = stream_seconds(group.device, lambda: None, [lambda step: compute.issue()], steps=3)
    shares = group.tell_one(1 - alone_s / max(taken[0], 1e-9))
    return min(1.0, max(0.0, median(shares[rank] for team in caller.teams for rank in team)))


class _OverlappedCalls(NamedTuple):
    rate: float  # portions per second
    call_s: float


def _times(spell_s: float, call_s: float) -> int:
    return max(_TRIAL_CALLS, round(spell_s / max(call_s, 1e-6)))


def _core_share(group: ProbeGroup, caller: Caller, nbytes: int, times: int) -> float:
    begun, used = time.perf_counter(), time.process_time()
    call(group, caller, nbytes, times)
    return (time.process_time() - used) / (time.perf_counter() - begun)


def _slowdown(before: float, beside: float, after: float) -> float:
    """The share by which less was computed beside the calls, beyond what times without them differ by.

    >>> round(_slowdown(100.0, 70.0, 100.0), 2), round(_slowdown(110.0, 70.0, 90.0), 2)
    (0.3, 0.1)
    """
    usual = (before + after) / 2
    return 1 - (beside + abs(before - after)) / usual


def _overlapped(group: ProbeGroup, compute: ComputeLoad, caller: Caller, nbytes: int, times: int) -> _OverlappedCalls:
    """Return how fast this thread computes while the lane's thread calls, and how long a call takes then."""
    begun = time.perf_counter()
    seconds: list[float] = []
    calls = start(group, caller, nbytes, times, seconds)
    rate = compute.rate(lambda: not calls.landed(0) and time.perf_counter() < begun + _BOUND_S)
    group.lane.wait(calls)
    return _OverlappedCalls(rate, median(seconds))
