"""Moments, and when they were: on the host a number, on a GPU an event that the stream will pass.

Nobody waits for an event: a step's line is written when the last of its events has passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

Moment = float | torch.cuda.Event


class Timer(Protocol):
    """Takes moments, and reads them later."""

    def now(self) -> Moment: ...
    def passed(self, moment: Moment) -> bool:
        """Return whether a moment can be read without waiting."""

    def read(self, moment: Moment) -> float:
        """Seconds of the host's monotonic clock."""

    def rebase(self, moment: Moment) -> None:
        """Reckon from this one, which has passed: what comes is read from here."""


class HostTimer:
    """The host's own clock."""

    now = staticmethod(time.perf_counter)
    # What it is already, a dozen times a step.
    read: Callable[[Moment], float] = staticmethod(float)  # type: ignore[assignment]  # and no event comes here

    def passed(self, moment: Moment) -> bool:
        return True

    def rebase(self, moment: Moment) -> None: ...


class DeviceTimer:
    """The stream's place on a GPU, told in the host's time.

    Note [Two clocks]
        An event knows only how far it is from another. The first is waited for, once, when the timer is made; later
        ones are reckoned from the last step's end, since a difference is a float of 32 bits and would lose
        microseconds after an hour. The GPU's clock and the host's drift apart by some millionths.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = torch.cuda.Event(enable_timing=True)
        self._base.record(torch.cuda.current_stream(device))
        self._base.synchronize()
        self._base_s = time.perf_counter()

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, moment: Moment) -> bool:
        return isinstance(moment, float) or moment.query()

    def read(self, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment
        return self._base_s + self._base.elapsed_time(moment) / 1e3

    def rebase(self, moment: Moment) -> None:
        if not isinstance(moment, float):
            self._base_s, self._base = self.read(moment), moment


def timer_for(devices: set[torch.device]) -> Timer:
    """The timer of the one GPU that these are; with several, or none, the host's."""
    first, *others = sorted(devices, key=str) or [torch.device("cpu")]
    return DeviceTimer(first) if first.type == "cuda" and not others else HostTimer()
