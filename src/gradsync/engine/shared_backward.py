"""The end of a backward that several GradSyncs share: each waits beside the others, none before another.

Note [Side by side]
    A rank may call the models of one backward in another order than the next rank, or leave one out (which then takes
    part in `optimizer.step()`). What a model waits for at the end of backward the other ranks send only when theirs
    is there: a header, then in the first step and after a change its new buckets, one exchange after the other. In
    whatever order one thread waited for two models, another rank's could be the opposite, and both would wait for
    ever. So nobody's wait stands behind another's: with more than one model, each has a thread.

    rank 0    launch A, launch B ─┬─ wait for A ─────────────┬─ backward() returns
                                  └─ wait for B ─┘           │
    rank 1    launch B, launch A ─┬─ wait for B ─┐           │
                                  └─ wait for A ─────────────┴─ backward() returns
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from gradsync.engine.hooks import queue_callback

Wait = Callable[[], None]
Then = Callable[[], None]


class _Ends:
    """The waits for the end of one backward; autograd keeps them until then."""

    def __init__(self) -> None:
        self.waits: list[tuple[Wait, Then]] = []

    def run(self) -> None:
        side_by_side(self.waits)


class _Last(threading.local):
    """The last backward on this thread whose end has begun; it keeps nothing of the models, which may go."""

    task = -1
    ends: Callable[[], _Ends | None] = staticmethod(lambda: None)


_last = _Last()


def end_together(wait: Wait, then: Then) -> None:
    """Run `wait` when all models have launched, beside theirs; called from a callback at the end of backward.

    When all have ended `then` is called on this thread, unless that one's wait raised.
    """
    task = torch._C._current_graph_task_id()
    ends = _last.ends() if _last.task == task else None
    if ends is None:
        ends = _Ends()
        _last.task, _last.ends = task, weakref.ref(ends)
        queue_callback(ends.run)
    ends.waits.append((wait, then))


def side_by_side(waits: list[tuple[Wait, Then]]) -> None:
    """Return when all have ended; raise what the first of them raised, if any did."""
    if len(waits) == 1:
        wait, then = waits[0]
        wait()
        then()
        return
    here = _ThreadState()
    model_waits = [_ModelWait(partial(here.run, wait)) for wait, _ in waits[:-1]]
    model_waits.append(_ModelWait(waits[-1][0], starts=False))
    model_waits[-1].run()
    for each in model_waits:
        each.join()
    for each, (_, then) in zip(model_waits, waits, strict=True):
        if each.error is None:
            then()
    for each in model_waits:
        if each.error is not None:
            raise each.error


class _ModelWait:
    """One model's wait, on a thread of its own if it `starts`; keeps what it raised."""

    def __init__(self, wait: Wait, starts: bool = True) -> None:
        self.error: Exception | None = None
        self._wait = wait
        # A daemon: Ctrl-C ends the main thread's wait, and nobody then waits for this one.
        self._thread = threading.Thread(target=self.run, name="gradsync-wait", daemon=True) if starts else None
        if self._thread is not None:
            self._thread.start()

    def run(self) -> None:
        try:
            self._wait()
        except Exception as error:
            self.error = error

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()


class _ThreadState:
    """The state of a thread in torch, to be the same on another: whether gradients are made, and streams."""

    def __init__(self) -> None:
        self._makes_gradients = torch.is_grad_enabled()
        self._streams: Sequence[torch.cuda.Stream] = []
        if torch.cuda.is_initialized():
            current = torch.cuda.current_device()
            has_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
            used = filter(has_context, range(torch.cuda.device_count()))
            others = [number for number in used if number != current]
            self._streams = [torch.cuda.current_stream(number) for number in (*others, current)]

    def run(self, wait: Wait) -> None:
        with self._on_streams(), torch.set_grad_enabled(self._makes_gradients):
            wait()

    @contextmanager
    def _on_streams(self) -> Iterator[None]:
        with ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            yield
