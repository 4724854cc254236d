"""What moving bytes takes from a processor that has gradients to compute.

Two ways to see it, and the larger one counts:

    the cores' time   what this process used while it only communicated
    the slowdown      how much less it computes while it communicates: interrupts, caches, a core shared
"""

from __future__ import annotations

import time
from statistics import median
from typing import NamedTuple

from gradsync.probe.crew import Crew
from gradsync.probe.labour import Labour
from gradsync.probe.sweep import Caller, call, start, takes_part

_SPELL_S, _BRIEF_SPELL_S = 0.4, 0.12
_TRIAL_CALLS = 2
_BOUND_S = 30.0  # then somebody looks after the peers


def burden(crew: Crew, labour: Labour, caller: Caller, nbytes: int, call_s: float) -> float:
    """The share of a core that calls of this size keep busy, from 0 to 1; every rank calls this, all get the same."""
    if crew.device.type == "cuda":
        return 0.0
    spell_s = _BRIEF_SPELL_S if crew.brief else _SPELL_S
    busy = takes_part(crew, caller)
    crew.meet()
    used = _core_share(crew, caller, nbytes, _times(spell_s, call_s)) if busy else 0.0
    # Beside computation calls take longer; how long is not known before.
    trial = _beside(crew, labour, caller, nbytes, _TRIAL_CALLS) if busy else _Beside(0.0, 0.0)
    beside_s = max(crew.tell_one(trial.call_s))
    before = labour.rate_for(spell_s / 2)
    crew.meet()
    beside = _beside(crew, labour, caller, nbytes, _times(spell_s, beside_s)).rate if busy else labour.rate_for(spell_s)
    crew.meet()
    after = labour.rate_for(spell_s / 2)
    told = crew.tell([used, _slowdown(before, beside, after)])
    shares = [max(told[rank]) for team in caller.teams for rank in team]
    return min(1.0, max(0.0, median(shares)))


class _Beside(NamedTuple):
    rate: float  # portions per second
    call_s: float


def _times(spell_s: float, call_s: float) -> int:
    return max(_TRIAL_CALLS, round(spell_s / max(call_s, 1e-6)))


def _core_share(crew: Crew, caller: Caller, nbytes: int, times: int) -> float:
    begun, used = time.perf_counter(), time.process_time()
    call(crew, caller, nbytes, times)
    return (time.process_time() - used) / (time.perf_counter() - begun)


def _slowdown(before: float, beside: float, after: float) -> float:
    """By which share less was computed beside the calls, as far as it is more than the times without them differ.

    >>> round(_slowdown(100.0, 70.0, 100.0), 2), round(_slowdown(110.0, 70.0, 90.0), 2)
    (0.3, 0.1)
    """
    usual = (before + after) / 2
    return 1 - (beside + abs(before - after)) / usual


def _beside(crew: Crew, labour: Labour, caller: Caller, nbytes: int, times: int) -> _Beside:
    """What this thread computes while the lane's thread calls."""
    begun = time.perf_counter()
    seconds: list[float] = []
    calls = start(crew, caller, nbytes, times, seconds)
    rate = labour.rate(lambda: not calls.landed(0) and time.perf_counter() < begun + _BOUND_S)
    crew.lane.wait(calls)
    return _Beside(rate, median(seconds))
