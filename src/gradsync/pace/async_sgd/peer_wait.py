"""Waiting for the other ranks' answers: as any wait, see [Waiting] in `transport.waiting`, with other names.

A rank is a worker and keeps a shard. A worker that stops while its process lives says so with `leave()`, and nobody
waits for it; but when a process dies its shard dies too, and nobody else has those parameters: that is PeerLost,
naming the rank and a parameter.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from gradsync.errors import GradSyncError, PeerLost, SyncTimeout, listed
from gradsync.pace.async_sgd.mail import Failure
from gradsync.transport.blame import PeerViews
from gradsync.transport.heartbeat import Phase
from gradsync.transport.lane import Lane
from gradsync.transport.waiting import BoundedWait, first_line

_FIRST_LOOK_S = 0.1  # before this rank says that it waits
_ANY_STEP = sys.maxsize  # workers are at different steps: that one is ahead excuses nothing


class _Awaited(NamedTuple):
    """The thing that a worker waits for."""

    what: str
    stragglers: Callable[[], list[int]]  # who is late when that takes too long


class PeerWait(BoundedWait[_Awaited]):
    """Waits, and knows whom to name."""

    step = _ANY_STEP

    def __init__(
        self, lane: Lane, timeout: float, shards: Sequence[Sequence[str]], failure: Callable[[], Failure | None]
    ) -> None:
        super().__init__(lane.session, lane.warn_after)
        self._timeout = timeout
        self._shards = shards  # the parameters of each rank's
        self._failure = failure

    def wait(self, landed: Callable[[float], bool], what: str, stragglers: Callable[[], list[int]]) -> None:
        """Return when `landed(slice_s)` says so; `stragglers` tells who is late when that takes too long."""
        self.check(what)
        if landed(_FIRST_LOOK_S):
            return
        before = self._session.said
        self.sleep(landed, self._timeout, _Awaited(what, stragglers))
        self._session.resume(before)

    def check(self, what: str) -> None:
        """Raise here what has ended the receiver thread."""
        failure = self._failure()
        if failure is not None:
            self.fail(what, failure)

    def fail(self, what: str, failure: Failure) -> NoReturn:
        """A thread of ours has failed, or the transport: it closes a connection, but does not say whose."""
        error = failure.error
        here = self._session.place()
        if failure.ours:
            raise GradSyncError(
                f"{here} the shard of this rank failed in an update ({type(error).__name__}: {first_line(error)}); the "
                "optimizer must take a step without a closure, from dense gradients"
            ) from error
        self._session.at(Phase.WAITING)
        culprits, views = self._session.liveness.investigate()
        if culprits:
            self._raise_lost(culprits, views, what, error)
        self._session.fail()
        raise GradSyncError(
            f"{here} the transport failed in {what} ({first_line(error)}), though every rank is alive. Look at the "
            "network between the hosts"
        ) from error

    def between_slices(self, awaited: _Awaited) -> None:
        self.check(awaited.what)

    def lose(self, culprits: list[int], views: PeerViews, awaited: _Awaited) -> NoReturn:
        self._raise_lost(culprits, views, awaited.what)

    def warn(self, views: PeerViews, awaited: _Awaited, waited: float) -> None:
        who = self._session.describe_peers(views, awaited.stragglers()) or "every rank is here"
        warnings.warn(f"{self._session.place()} has waited {waited:.0f} s for {awaited.what}: {who}", stacklevel=5)

    def lose_patience(self, views: PeerViews, awaited: _Awaited, waited: float) -> NoReturn:
        others = [rank for rank in awaited.stragglers() if rank in views]
        self._session.fail(tuple(others))
        who = self._session.describe_peers(views, others) or "every rank is here, but no answer arrives"
        raise SyncTimeout(
            f"{self._session.place()} waited {waited:.1f} s for {awaited.what}: {who}. Look at what that rank does "
            "there, have it call sync.drain() when it has no more data, or allow more time with "
            "gs.Guard(timeout=seconds)",
            self._session.global_ranks(others),
        )

    def _raise_lost(self, culprits: list[int], views: PeerViews, what: str, error: Exception | None = None) -> NoReturn:
        session = self._session
        ranks = session.global_ranks(culprits)
        if session.groups.rank in culprits:
            session.fail(tuple(culprits))
            raise SyncTimeout(
                f"{session.place()} the others gave up waiting for this rank, which came too late to {what}. Look "
                "at what held it up, or allow more time with gs.Guard(timeout=seconds)",
                ranks,
            ) from error
        session.fail(tuple(culprits), lost=True)
        shards = "; ".join(f"{listed(session.global_ranks([rank]))} kept {self._shard(rank)}" for rank in culprits)
        raise PeerLost(
            f"{session.place()} {session.describe_culprits(views, culprits)}, while this rank was in {what}; {shards}, "
            "which no other rank holds. Exit with an error and let the launcher restart all ranks (torchrun "
            "--max-restarts) from the last checkpoint",
            ranks,
        ) from error

    def _shard(self, rank: int) -> str:
        names = self._shards[rank]
        if not names:
            return "no parameter, but the clocks that all wait for"
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"the shard of {names[0]!r}{more}"
