"""The timing of one call: in the main thread, or in a side thread while the main thread computes in Python.

idle    main   arrive │ t0 call t1
busy    main   waits  │ while not done: pass      the interpreter lock is taken whenever the call lets go
        side   arrive │ t0 call t1                of it, as a training loop would take it
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

Step = Callable[[], object]
Clock = Callable[[Step, Step], float]


@contextmanager
def clock(busy: bool) -> Iterator[Clock]:
    """`time(arrive, call)`: the seconds of `call`, begun when `arrive` returns."""
    if not busy:
        yield _time
        return
    side = _SideThread()
    try:
        yield side.time
    finally:
        side.end()


def _time(arrive: Step, call: Step) -> float:
    arrive()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class _SideThread:
    """A thread that makes the calls."""

    def __init__(self) -> None:
        self._steps: tuple[Step, Step] | None = None
        self._seconds = 0.0
        self._error: BaseException | None = None
        self._done = False
        self._begin, self._spin = threading.Semaphore(0), threading.Lock()
        self._spin.acquire()
        self._thread = threading.Thread(target=self._serve, name="gradsync-bench-side", daemon=True)
        self._thread.start()

    def time(self, arrive: Step, call: Step) -> float:
        self._steps, self._done = (arrive, call), False
        self._begin.release()
        self._spin.acquire()  # asleep until all ranks are here: the way to the barrier is not what is measured
        while not self._done:
            pass
        if self._error is not None:
            raise self._error
        return self._seconds

    def end(self) -> None:
        self._steps = None
        self._begin.release()
        self._thread.join()

    def _serve(self) -> None:
        while self._begin.acquire() and self._steps is not None:
            arrive, call = self._steps
            try:
                self._seconds = _time(partial(self._arrive_and_spin, arrive), call)
            except BaseException as error:
                self._error = error
                if self._spin.locked():
                    self._spin.release()
            self._done = True

    def _arrive_and_spin(self, arrive: Step) -> None:
        arrive()
        self._spin.release()
