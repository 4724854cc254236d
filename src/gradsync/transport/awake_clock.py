"""The one clock of all waits: it counts the time that this process was awake.

Note [Time awake]
    A job may be stopped as a whole (SIGSTOP to all ranks, a laptop that sleeps, a scheduler that lets another job
    go first) and go on an hour later. On waking nobody is late: that hour was not waited. So a wait looks at its
    clock in slices of a fraction of a second, and what passed between two looks counts as a second at most.

        wall clock     ├──┼──┼──┼──✕ stopped ………………………………… woken ├──┼──┼──
        time awake     ├──┼──┼──┼─────┤ 1 s at most              ├──┼──┼──

    Who waits only looks now and then must not use it.
"""

from __future__ import annotations

import threading
import time

MOST_S = 1.0  # that may pass between two looks


class Awake:
    """A bound in seconds of time awake, counted from now; look at it several times a second."""

    def __init__(self, seconds: float = float("inf")) -> None:
        self.seconds = seconds
        self.passed = 0.0
        self._last = time.monotonic()
        self._looking = threading.Lock()

    def look(self) -> float:
        """Seconds awake so far; any thread may look."""
        with self._looking:
            now = time.monotonic()
            self.passed += min(now - self._last, MOST_S)
            self._last = now
            return self.passed

    def left(self) -> float:
        """Seconds of the bound that are left, below zero when it is over; looks."""
        return self.seconds - self.look()

    def over(self) -> bool:
        """Whether the bound has passed; looks."""
        return self.look() >= self.seconds
