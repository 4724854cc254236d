"""The operations that are under way: a pending for each, whatever moves it.

    Collective    gloo's own, on its threads
    OnStream      what was issued to a stream of a GPU
    ByWorker      an operation in shared memory, a sum say, by the team's worker
    ByCaller      an operation in shared memory, done by whoever waits for it
    BoardMessage  a message from each to all on the team's boards
    GatheredRows  one by gloo
    Promise       what a thread of ours will finish: a bucket's rounds, say
    LaneTask      a Python function on the lane's thread

`landed(slice_s)` waits for at most a slice and tells whether it has ended; `settle()` then raises what went
wrong, or orders streams.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gradsync.kernels.library import Op
from gradsync.transport.awake_clock import AwakeClock
from gradsync.transport.shared_memory import Team
from gradsync.transport.stream_work import StreamWork

_LOOK_S = 0.002  # between two looks at a GPU


class Pending(ABC):
    """Something under way; `what` and `bucket` are how an error names it."""

    on_host = True  # whether waiting blocks the host, or a stream
    patience_s = 0.0  # how long to wait before looking after the peers

    def __init__(self, what: str, nbytes: int = 0, bucket: int = -1) -> None:
        self.launched_at = time.perf_counter()
        self.finished_at = 0.0
        self.what = what
        self.bucket = bucket
        self.nbytes = nbytes
        self.succeeded = False
        self.refused = False  # it came to nothing on every rank at once, and what follows may go on

    def refuse(self) -> None:
        """Ranks disagree over it, and none has touched anything."""
        self.refused = True

    @abstractmethod
    def landed(self, slice_s: float) -> bool:
        """Wait for at most `slice_s`, and return whether it has ended, well or badly."""

    @abstractmethod
    def settle(self) -> None:
        """Raise RuntimeError if it failed; called after it has landed."""


class Collective(Pending):
    """A collective of gloo."""

    def __init__(self, work: dist.Work, what: str, nbytes: int, bucket: int) -> None:
        super().__init__(what, nbytes, bucket)
        self._work = work
        self._done = threading.Event()
        work.get_future().add_done_callback(self._completed)

    def _completed(self, future: Any) -> None:
        self.finished_at = time.perf_counter()
        with contextlib.suppress(RuntimeError):
            future.value()
            self.succeeded = True
        self._done.set()

    def landed(self, slice_s: float) -> bool:
        return self._done.wait(slice_s)

    def settle(self) -> None:
        self._work.wait()


class GatheredRows(Collective):
    """Every rank's row, by gloo."""

    def __init__(self, work: dist.Work, rows: torch.Tensor, what: str) -> None:
        super().__init__(work, what, rows.shape[1], -1)
        self.rows = rows


class OnStream(Pending):
    """A collective, or messages, on a stream of a GPU: whoever settles it has the current stream wait, not the host."""

    on_host = False

    def __init__(self, work: StreamWork, what: str, nbytes: int, bucket: int) -> None:
        super().__init__(what, nbytes, bucket)
        self._work = work

    def landed(self, slice_s: float) -> bool:
        self.succeeded = self.succeeded or self._work.landed()
        if not self.succeeded and slice_s > 0:
            bound = AwakeClock(slice_s)
            while not self.succeeded and not bound.over():
                time.sleep(_LOOK_S)
                self.succeeded = self._work.landed()
        return self.succeeded

    def settle(self) -> None:
        self._work.wait()


def pending_of(work: dist.Work | StreamWork, what: str, nbytes: int, bucket: int) -> Pending:
    """A channel's work, as something that can be waited for."""
    kind = OnStream if isinstance(work, StreamWork) else Collective
    return kind(work, what, nbytes, bucket)  # type: ignore[arg-type]


class _TeamPending(Pending):
    """Something that a team does: `_go_on` may raise, which is kept for `settle`."""

    _error: Exception | None = None

    @abstractmethod
    def _go_on(self, slice_s: float) -> bool: ...

    def landed(self, slice_s: float) -> bool:
        if self.succeeded or self._error is not None:
            return True
        try:
            self.succeeded = self._go_on(slice_s)
        except Exception as error:
            self._error = error
        return self.succeeded or self._error is not None

    def settle(self) -> None:
        if self._error is not None:
            raise self._error


class ByWorker(_TeamPending):
    """An operation of the team that its worker does: a sum, say."""

    def __init__(self, team: Team, op: Op, keeps: object, what: str, nbytes: int, bucket: int) -> None:
        super().__init__(what, nbytes, bucket)
        self._keeps = keeps  # the worker reads and writes there
        self._job = team.submit(op)

    def _go_on(self, slice_s: float) -> bool:
        done = self._job.wait(slice_s)
        self.finished_at = self._job.finished_at
        return done


class ByCaller(_TeamPending):
    """An operation of the team that the waiting thread does itself."""

    patience_s = 0.05

    def __init__(self, team: Team, stream: int, op: Op, what: str) -> None:
        super().__init__(what)
        self._team, self._stream, self._op = team, stream, op

    def _go_on(self, slice_s: float) -> bool:
        return self._team.advance(self._stream, self._op, slice_s)


class BoardMessage(_TeamPending):
    """Every rank's row on the boards."""

    def __init__(self, team: Team, row: torch.Tensor, what: str) -> None:
        super().__init__(what, row.numel())
        self.rows = torch.empty(team.size, row.numel(), dtype=torch.uint8, device="cpu")
        self._team = team
        team.post(row)

    def _go_on(self, slice_s: float) -> bool:
        done = self._team.collect(self.rows, slice_s)
        self.finished_at = time.perf_counter()
        return done


class Promise(Pending):
    """An operation that a thread of ours will finish."""

    def __init__(self, what: str, nbytes: int, bucket: int, on_host: bool = True) -> None:
        super().__init__(what, nbytes, bucket)
        self.on_host = on_host
        self._after: Callable[[], None] = _nothing
        self._done = threading.Event()
        self._error: Exception | None = None

    def then(self, after: Callable[[], None]) -> None:
        """Take what the waiting thread is to do when it has landed."""
        self._after = after

    def finish(self, error: Exception | None = None) -> None:
        """The work has ended: well, or by this error."""
        self._error = error
        self.succeeded = error is None
        self.finished_at = time.perf_counter()
        self._done.set()

    def landed(self, slice_s: float) -> bool:
        return self._done.wait(slice_s)

    def settle(self) -> None:
        if self._error is not None:
            raise self._error
        self._after()


class LaneTask(Promise):
    """A function that the lane's thread runs in its turn."""

    def __init__(self, run: Callable[[], None], what: str, nbytes: int, bucket: int) -> None:
        super().__init__(what, nbytes, bucket)
        self._run = run

    def go(self, broken: Exception | None) -> Exception | None:
        """Run on the lane's thread, unless an earlier one failed; return the error there was."""
        failed: Exception | None = None
        try:
            if broken is not None:
                raise RuntimeError(str(broken)) from broken
            self._run()
        except Exception as error:
            failed = error
        self._run = _nothing  # what it holds (tensors, say) is free now
        self.finish(failed)
        return failed


def _nothing() -> None: ...
