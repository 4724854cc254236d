"""The works that collectives hand back: a `Work` of torch, for Python and for C++ alike.

Note [Futures]
    C++ (DDP's reducer, say) waits for a future of torch, which somebody must complete: a thread of ours, in the order
    of issue, as soon as one was asked for. It needs the interpreter for a moment, which whoever waits in C++ has given
    up. If it runs a callback that itself asks for a future, as PowerSGD's hook does, it completes that one on the spot:
    nobody else would.

Note [Errors in backward]
    A future that fails reaches C++ as a RuntimeError with our text but not our type. So a sum whose future is asked for
    during backward is also waited for at the end of backward, by a callback that comes before DDP's own: what
    `backward()` raises is then `gs.PeerLost` itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

from gradsync.errors import PeerLost, SyncTimeout
from gradsync.torch_backend.collectives import TeamOperation, TeamQueue
from gradsync.transport.awake_clock import AwakeClock
from gradsync.transport.lane import Lane
from gradsync.transport.lane_thread import LaneThread
from gradsync.transport.pending import LaneTask

_TRANSPORT = "gloo/transport"  # in what gloo says when a connection failed, and in nothing that a caller did wrong
NO_TIMEOUT = timedelta(0)
_SLICE_S = 0.1


class WrappedWork(dist.Work):
    """The work that a collective hands back, with something added by those who inherit."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return self._work.wait(timeout)

    def synchronize(self) -> None:
        self._work.synchronize()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return self._work.result()

    def source_rank(self) -> int:
        return self._work.source_rank()

    def _source_rank(self) -> int:
        return self._work._source_rank()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._work.get_future()

    def get_future_result(self) -> torch.futures.Future[Any]:
        return self._work.get_future_result()  # type: ignore[attr-defined]  # missing in the stubs

    def block_current_stream(self) -> None:
        self._work.block_current_stream()


class CompletedWork(dist.Work):
    """The work of a collective that was done before it was handed back."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def synchronize(self) -> None: ...

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future = torch.futures.Future[list[torch.Tensor]]()
        future.set_result(self._tensors)
        return future


class SharedWork(dist.Work):
    """Operations under way in shared memory."""

    def __init__(
        self,
        queue: TeamQueue,
        completer: Completer,
        calls: Sequence[TeamOperation],
        tensors: Sequence[torch.Tensor],
        limit: float,
    ) -> None:
        super().__init__()
        self._queue = queue
        self._completer = completer
        self._calls = calls
        self._in_flight = queue.start(calls)
        self._tensors = list(tensors)
        self._limit = limit  # seconds
        self._lock = threading.Lock()  # whoever comes first settles, the others learn how it went
        self._settled = False
        self._error: BaseException | None = None
        self._future_completed = False
        self._bare = torch.futures.Future[Any]()
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return when the tensors hold the result; raise if somebody is lost, or does not come in time."""
        limit = timeout.total_seconds() or self._limit
        if not self._lock.acquire(timeout=_SLICE_S):
            self._wait_for_settler(limit)
        try:
            if not self._settled:
                self._settle(limit)
        finally:
            self._lock.release()
        if self._future is not None:
            self._complete_future(self._future)
        if self._error is not None:
            raise self._error
        return True

    def _wait_for_settler(self, limit: float) -> None:
        """Get the lock: somebody else settles it, who looks after the peers, perhaps with a longer bound."""
        bound, lane = AwakeClock(limit - _SLICE_S), self._queue.lane
        while not self._lock.acquire(timeout=_SLICE_S):
            if bound.over():
                what = self._calls[0].what
                error = SyncTimeout(f"{lane.place()} waited {limit:.1f} s for {what}; allow more time", ())
                lane.fail()
                lane.give_up(error)
                raise error

    def is_completed(self) -> bool:
        """Return whether it has ended; then the tensors hold the result, also for who only asks and never waits."""
        if not self._settled and all(pending.landed(0) for pending in self._in_flight):
            self.complete()
        return self._settled

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return what went wrong, as far as it has ended."""
        if self.is_completed():
            try:
                self.wait()
            except RuntimeError as error:
                return error
        return None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """The tensors, when they hold the result; see [Futures]."""
        with self._lock:
            new = self._future is None
            if self._future is None:
                # It fails where C++ can see it, when the bare one brings an error.
                self._future = self._bare.then(_unwrap)
        if new:
            self._completer.take(self)
        return self._future

    def complete(self) -> None:
        """Wait, then tell whoever has the future. Never raises."""
        with contextlib.suppress(RuntimeError):
            self.wait()

    def _complete_future(self, future: torch.futures.Future[Any]) -> None:
        with self._lock:
            mine, self._future_completed = not self._future_completed, True
        if mine:
            self._bare.set_result(self._tensors if self._error is None else self._error)
        else:
            with contextlib.suppress(RuntimeError):
                future.wait()  # somebody else is just telling

    def _settle(self, timeout: float) -> None:
        try:
            self._queue.settle(self._calls, self._in_flight, timeout)
        except RuntimeError as error:
            self._error = error
        self._settled = True


class IntegerMean(WrappedWork):
    """A sum of integers that becomes their mean, rounded towards zero as NCCL does; gloo refuses such a mean."""

    def __init__(self, work: dist.Work, tensors: Sequence[torch.Tensor], num_ranks: int) -> None:
        super().__init__(work)
        self._tensors = list(tensors)
        self._num_ranks = num_ranks
        self._lock = threading.Lock()
        self._divided = False

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        self._work.wait(timeout)
        self._divide()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        completed = self._work.is_completed()
        if completed and self._work.is_success():
            self._divide()
        return completed

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        def divided(future: torch.futures.Future[Any]) -> list[torch.Tensor]:
            future.value()  # raises what went wrong
            return self._divide()

        return self._work.get_future().then(divided)

    def _divide(self) -> list[torch.Tensor]:
        with self._lock:
            if not self._divided:
                self._divided = True
                for tensor in self._tensors:
                    tensor.div_(self._num_ranks, rounding_mode="trunc")
        return self._tensors


class Completer:
    """Completes the futures of a group's works, in order; see [Futures] and [Errors in backward]."""

    def __init__(self, lane_thread: LaneThread) -> None:
        self._lane_thread = lane_thread
        self._thread = -1  # that of the lane thread, once it runs
        self._task = -1  # the backward that has a callback, which waits for these
        self._in_backward: list[SharedWork] = []

    def take(self, work: SharedWork) -> None:
        if threading.get_ident() == self._thread or work.is_completed():
            work.complete()
            return
        self._lane_thread.take(LaneTask(lambda: self._complete(work), "a future", 0, -1))
        task = torch._C._current_graph_task_id()
        if task == -1:
            return
        if task != self._task:
            self._task, self._in_backward = task, []
            Variable._execution_engine.queue_callback(partial(_wait_for_all, self._in_backward))
        self._in_backward.append(work)

    def _complete(self, work: SharedWork) -> None:
        self._thread = threading.get_ident()
        work.complete()


def _wait_for_all(works: list[SharedWork]) -> None:
    while works:
        works.pop(0).wait()


def _unwrap(future: torch.futures.Future[Any]) -> list[torch.Tensor]:
    value = future.value()
    if isinstance(value, BaseException):
        raise value
    return value


class GlooErrors:
    """Finds out who is gone when gloo fails."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def named(self, what: str, error: RuntimeError) -> RuntimeError:
        """The error to raise: who was lost, or gloo's own if nobody was."""
        if _TRANSPORT not in str(error):
            return error
        try:
            self._lane.name_lost(what, error)
        except PeerLost as lost:
            return lost
        return error


class NamingWork(WrappedWork):
    """A work of gloo whose wait names the dead."""

    def __init__(self, work: dist.Work, what: str, gloo_errors: GlooErrors) -> None:
        super().__init__(work)
        self._what = what
        self._gloo_errors = gloo_errors

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return self._naming(lambda: self._work.wait(timeout))

    def synchronize(self) -> None:
        self._naming(self._work.synchronize)

    def _naming(self, wait: Callable[[], Any]) -> Any:
        try:
            return wait()
        except RuntimeError as error:
            raise self._gloo_errors.named(self._what, error) from error
