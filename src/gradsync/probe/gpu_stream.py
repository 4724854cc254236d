"""A GPU's stream is timed by the GPU's own clock, while the host is far ahead of it.

A small kernel is done sooner than the host can issue the next one, so what is timed waits behind a pause until the host
has issued all of it. In training it is alike: the host runs ahead while the GPU computes.

    host      │ pause, part 0, part 1, part 0 … issued │
    stream    │ pause ─────────────────────────────────── │ part 0 │ part 1 │ part 0 │ …
                                                          ▲        ▲        ▲  moments
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

import torch

_CYCLES_PER_S = 2e9  # no GPU ticks much faster, so a pause is rather too long than too short
_LEAST_PAUSE_S = 0.002


def moment() -> torch.cuda.Event:
    """The moment when the current stream has done what it was given so far."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(moments: Sequence[torch.cuda.Event]) -> list[float]:
    """The seconds from each moment to the next; the host waits for the last."""
    moments[-1].synchronize()
    return [first.elapsed_time(last) / 1e3 for first, last in pairwise(moments)]


def pause(seconds: float) -> None:
    """Have the current stream do nothing for at least so long."""
    torch.cuda._sleep(math.ceil(_CYCLES_PER_S * max(_LEAST_PAUSE_S, seconds)))


def stream_seconds(
    device: torch.device, bring: Callable[[], object], parts: Sequence[Callable[[int], object]], steps: int
) -> tuple[float, list[float]]:
    """Seconds of the host to issue all parts, and of the stream for each: medians over steps, `bring()` before each."""
    with torch.cuda.device(device):
        for part in parts:  # kernels are compiled and loaded now
            part(0)
        issued = []
        for step in range(1, steps + 1):
            bring()
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for part in parts:
                part(step)
            issued.append(time.perf_counter() - begun)
        pause(2 * sum(issued))
        taken = []
        for step in range(steps + 1, 2 * steps + 1):
            bring()
            moments = [moment()]
            for part in parts:
                part(step)
                moments.append(moment())
            taken.append(moments)
        by_step = [seconds_between(moments) for moments in taken]
    return median(issued), [median(each) for each in zip(*by_step, strict=True)]
