"""The lane's own thread, for what takes several turns: rounds of messages, hosts and then across.

It starts with the first task. One task after the other, in the order in which they were handed over, which
is the same on every rank.
"""

from __future__ import annotations

import queue
import threading

from gradsync.transport.pending import LaneTask


class LaneThread:
    """Runs tasks in order; after one has failed, all that follow fail too."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[LaneTask | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def take(self, task: LaneTask) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=_run_tasks, args=(self._tasks,), name="gradsync-lane", daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def close(self, timeout_s: float) -> None:
        """Stop after what was handed over; a thread that is stuck in a backend is left alone."""
        if self._thread is not None:
            self._tasks.put(None)
            if self._thread is not threading.current_thread():  # the garbage collector may run anywhere
                self._thread.join(timeout_s)
            self._thread = None


# Not a method: the thread must not keep the lane thread's owner alive.
def _run_tasks(tasks: queue.SimpleQueue[LaneTask | None]) -> None:
    broken: Exception | None = None
    while (task := tasks.get()) is not None:
        broken = task.go(broken) or broken
        del task
