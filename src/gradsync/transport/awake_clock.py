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


class AwakeClock:
    """A bound in seconds of time awake, counted from now; look at it several times a second."""

    def __init__(self, seconds: float = float("inf"), before: float = 0.0) -> None:
        """`before`: seconds that count already."""
        self.seconds = seconds
        self.passed = before
        self._last = time.monotonic()
        self._looking = threading.Lock()

    def tick(self) -> float:
        """Seconds awake since the last look; any thread may look."""
        with self._looking:
            now = time.monotonic()
            elapsed = min(now - self._last, MOST_S)
            self.passed += elapsed
            self._last = now
            return elapsed

    def look(self) -> float:
        """Seconds awake so far; looks."""
        self.tick()
        return self.passed

    def shorten(self, seconds: float) -> None:
        """Leave at most so many more."""
        self.seconds = min(self.seconds, self.look() + seconds)

    def left(self) -> float:
        """Seconds of the bound that are left, below zero when it is over; looks."""
        return self.seconds - self.look()

    def over(self) -> bool:
        """Look, and return whether the bound has passed."""
        return self.look() >= self.seconds
