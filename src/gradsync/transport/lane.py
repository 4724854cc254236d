"""One ordered lane: what is launched here is launched in the same order on every rank.

The lane issues each collective at once, from the thread that calls it, and the backend runs it beside the
computation: gloo on threads of its own, NCCL on a stream of its own. No Python thread stands between a full
bucket and the wire; one would need the interpreter, which costs up to 5 ms beside a busy Python thread.

Note [Waiting]
    Never `work.wait(timeout)` as a poll: on gloo the first expiry closes the connection for good. A wait
    here sleeps on an event that the backend's completion sets, in slices, and looks after the peers in
    between; Ctrl-C interrupts it. `work.wait()` is called only when the work has completed, to raise its
    error or to order streams.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist

from gradsync.errors import PeerLost, SyncTimeout, listed, place
from gradsync.policy import Guard
from gradsync.transport.groups import Groups
from gradsync.transport.liveness import Liveness
from gradsync.transport.page import Phase

_SLICE_S = 0.1


class Ticket:
    """A collective under way."""

    __slots__ = ("bucket", "done", "finished_at", "launched_at", "nbytes", "on_host", "what", "work")

    def __init__(self, work: dist.Work, what: str, bucket: int, nbytes: int, on_host: bool) -> None:
        self.launched_at = time.perf_counter()
        self.finished_at = 0.0
        self.work = work
        self.what = what
        self.bucket = bucket
        self.nbytes = nbytes
        self.on_host = on_host
        self.done = threading.Event()
        if on_host:
            work.get_future().add_done_callback(self._completed)

    def _completed(self, _: Any) -> None:
        self.finished_at = time.perf_counter()
        self.done.set()


class Lane:
    """Launches collectives in order and waits for them within bounds."""

    def __init__(self, groups: Groups, liveness: Liveness, guard: Guard, timeout: float) -> None:
        self.groups = groups
        self.liveness = liveness
        self.step = 0
        self._guard = guard
        self._timeout = timeout
        self.describe: Callable[[int], str] = lambda bucket: f"bucket {bucket}"

    def launch(
        self, issue: Callable[[], dist.Work], what: str, nbytes: int, bucket: int = -1, on_host: bool = True
    ) -> Ticket:
        """Issue a collective now; `what` is how an error names it."""
        try:
            return Ticket(issue(), what, bucket, nbytes, on_host)
        except RuntimeError as error:
            self._fail(what, bucket, error)

    def wait(self, ticket: Ticket) -> None:
        """Return when the collective has completed (nccl: when the stream will wait for it)."""
        if ticket.on_host and not ticket.done.is_set():
            self._sleep_until(ticket)
        try:
            ticket.work.wait()
        except RuntimeError as error:
            self._fail(ticket.what, ticket.bucket, error)

    def run(self, issue: Callable[[], dist.Work], what: str, on_host: bool = True) -> None:
        """Launch and wait."""
        self.wait(self.launch(issue, what, 0, on_host=on_host))

    def at(self, phase: Phase, bucket: int = -1) -> None:
        """Say where this rank is."""
        self.liveness.at(self.step, phase, bucket)

    def fail(self, culprits: tuple[int, ...] = ()) -> None:
        """Say that this rank has given up, and because of whom."""
        self.liveness.at(self.step, Phase.FAILED, culprits=culprits)

    def global_ranks(self, ranks: list[int]) -> list[int]:
        return [self.groups.ranks[rank] for rank in ranks]

    def place(self, bucket: int = -1) -> str:
        rank = self.groups.ranks[self.groups.rank]
        return place(rank, self.groups.size, self.step, bucket if bucket >= 0 else None)

    def _sleep_until(self, ticket: Ticket) -> None:
        self.liveness.watch(True)
        start = time.monotonic()
        warned = False
        while not ticket.done.wait(_SLICE_S):
            waited = time.monotonic() - start
            if lost := self.liveness.lost():
                self._raise_lost(lost, ticket.what, ticket.bucket, None)
            if waited >= self._timeout:
                self._raise_late(waited, ticket)
            if not warned and waited >= self._guard.warn_after:
                warned = True
                late = "; ".join(self._doing(rank) for rank in self._late())
                warnings.warn(
                    f"{self.place(ticket.bucket)} has waited {waited:.0f} s for "
                    f"{self._name(ticket.what, ticket.bucket)}: {late or 'every rank is here'}",
                    stacklevel=2,
                )
        self.liveness.watch(False)

    def _fail(self, what: str, bucket: int, error: RuntimeError) -> NoReturn:
        if culprits := self.liveness.responsible():
            self._raise_lost(culprits, what, bucket, error)
        self.fail()
        raise SyncTimeout(
            f"{self.place(bucket)} the transport failed in {self._name(what, bucket)} ({_first_line(error)}), "
            "though every rank gives signs of life; look at the network between the hosts, then resume from the last "
            "checkpoint",
            [],
        ) from error

    def _raise_lost(self, lost: list[int], what: str, bucket: int, cause: BaseException | None) -> NoReturn:
        self.fail(tuple(lost))
        who = "; ".join(self._how(rank) for rank in lost)
        raise PeerLost(
            f"{self.place(bucket)} {who}, while this rank was in {self._name(what, bucket)}. "
            "The step cannot be completed: exit with an error and let the launcher restart all ranks "
            "(torchrun --max-restarts) from the last checkpoint",
            self.global_ranks(lost),
        ) from cause

    def _raise_late(self, waited: float, ticket: Ticket) -> NoReturn:
        late = self._late()
        self.fail(tuple(late))
        who = "; ".join(self._doing(rank) for rank in late) or "every rank is here, but the data does not arrive"
        raise SyncTimeout(
            f"{self.place(ticket.bucket)} waited {waited:.1f} s for {self._name(ticket.what, ticket.bucket)}: {who}. "
            "Look at what that rank does there, or allow more time with gs.Guard(timeout=seconds)",
            self.global_ranks(late),
        )

    def _late(self) -> list[int]:
        """Ranks that are not in this synchronization (yet, or any more)."""
        here = (self.step, Phase.SYNCHRONIZING)
        return [r for r, state in self.liveness.states().items() if (state.step, state.phase) != here]

    def _doing(self, rank: int) -> str:
        state = self.liveness.states()[rank]
        name = listed(self.global_ranks([rank]))
        if state.phase == Phase.LEFT:
            return f"{name} has left"
        if state.phase == Phase.FAILED:
            return f"{name} failed in step {state.step}"
        return f"{name} is alive but still {state.phase} in step {state.step}"

    def _how(self, rank: int) -> str:
        name = listed(self.global_ranks([rank]))
        pid = self.liveness.pid(rank)
        peer = self.liveness.states().get(rank)
        if peer is not None and peer.phase == Phase.LEFT:
            return f"{name} detached or ended in step {peer.step}"
        where = f" (pid {pid})" if pid is not None else ""
        if self.liveness.is_dead(rank):
            return f"{name}{where} died in step {peer.step if peer else '?'}"
        return f"{name}{where} gave no sign of life for {self._guard.dead_after:g} s"

    def _name(self, what: str, bucket: int) -> str:
        return self.describe(bucket) if bucket >= 0 else what


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
