"""The lane's own thread, for what takes several turns: rounds of messages, hosts and then across.

It starts with the first errand. One errand after the other, in the order in which they were handed over, which
is the same on every rank.
"""

from __future__ import annotations

import queue
import threading

from gradsync.transport.pending import Errand


class LaneThread:
    """Runs errands in order; after one has failed, all that follow fail too."""

    def __init__(self) -> None:
        self._errands: queue.SimpleQueue[Errand | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def take(self, errand: Errand) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run_errands, args=(self._errands,), name="gradsync-lane", daemon=True
            )
            self._thread.start()
        self._errands.put(errand)

    def close(self, timeout_s: float) -> None:
        """Stop after what was handed over; a thread that is stuck in a backend is left to its fate."""
        if self._thread is not None:
            self._errands.put(None)
            if self._thread is not threading.current_thread():  # the garbage collector may run anywhere
                self._thread.join(timeout_s)
            self._thread = None


# Not a method: the thread must not keep the lane thread's owner alive.
def _run_errands(errands: queue.SimpleQueue[Errand | None]) -> None:
    broken: Exception | None = None
    while (errand := errands.get()) is not None:
        broken = errand.go(broken) or broken
        del errand
