"""The one wait for other ranks: bounded, and ending with a name.

Note [Waiting]
    Never `work.wait(timeout)` as a poll: on gloo the first expiry closes the connection for good. A wait
    here sleeps on an event that the backend's completion sets (shared memory: on a word), in slices, and
    looks after the peers in between; Ctrl-C interrupts it. `work.wait()` is called only when the work has
    completed, to raise its error or to order streams.

    waiting  ├─ slice ─┼─ slice ─┼─ …           ends at once when somebody is dead or silent,
             peer gave up ├─── 1 s ───┤         a second after somebody gave up or left,
             warn_after ──────────┤             with a warning on the way,
             timeout ────────────────────────┤  and at the latest here
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, NoReturn, TypeVar

from gradsync.errors import JOIN, PeerLost, SyncTimeout, listed
from gradsync.transport.awake_clock import AwakeClock
from gradsync.transport.blame import PeerViews, blame, is_lost, late, lost, stopped, unheard, way_out
from gradsync.transport.heartbeat import Phase
from gradsync.transport.pending import Pending
from gradsync.transport.session import Session
from gradsync.transport.shared_memory import Team

_SLICE_S = 0.1
GRACE_S = 1.0  # for our data to arrive after a peer gave up or left: it may have sent all of it before

Awaited = TypeVar("Awaited")


class BoundedWait(ABC, Generic[Awaited]):
    """Sleeps until something has come, in slices; who inherits knows what to say when it does not."""

    def __init__(self, session: Session, warn_after: float) -> None:
        self._session = session
        self._warn_after = warn_after  # seconds of waiting after which somebody is told

    def sleep(self, landed: Callable[[float], bool], timeout: float, awaited: Awaited, bucket: int = -1) -> None:
        """Return when `landed(slice_s)` says so, this rank's page saying meanwhile that it waits."""
        session, liveness = self._session, self._session.liveness
        session.at(Phase.WAITING, bucket)
        if landed(_SLICE_S):  # as nearly all do: then nobody was looked at
            return
        liveness.watch(True)
        clock, stopped_at, warned = AwakeClock(before=_SLICE_S), None, False
        while True:
            self.between_slices(awaited)
            waited, views = clock.look(), liveness.peer_views()
            if culprits := lost(views, self.step):
                self.lose(culprits, views, awaited)
            if suspects := stopped(views):
                stopped_at = waited if stopped_at is None else stopped_at
                if waited - stopped_at >= GRACE_S:
                    self.lose(self.blamed(views, suspects), views, awaited)
            if waited >= timeout:
                self.lose_patience(views, awaited, waited)
            if not warned and waited >= self._warn_after:
                warned = True
                self.warn(views, awaited, waited)
            if landed(_SLICE_S):
                break
        liveness.watch(False)

    def blamed(self, views: PeerViews, suspects: list[int]) -> list[int]:
        """Return whom the suspects hold responsible, or else themselves."""
        guilty, excused = blame(views, suspects, self.step, self._session.groups.size)
        return guilty or excused

    @property
    @abstractmethod
    def step(self) -> int:
        """The step of this wait: who is past it is excused."""

    def between_slices(self, awaited: Awaited) -> None:
        """Raise what else ends such a wait."""

    @abstractmethod
    def lose(self, culprits: list[int], views: PeerViews, awaited: Awaited) -> NoReturn:
        """Give up because of ranks that take part no more."""

    @abstractmethod
    def lose_patience(self, views: PeerViews, awaited: Awaited, waited: float) -> NoReturn:
        """Give up because the time is over."""

    @abstractmethod
    def warn(self, views: PeerViews, awaited: Awaited, waited: float) -> None:
        """Tell that it takes long."""


class LaneWait(BoundedWait[Pending]):
    """A lane's wait for what it has launched."""

    def __init__(
        self,
        session: Session,
        warn_after: float,
        under_way: deque[Pending],
        within_hosts: Sequence[Team],
        more_time: str,
    ) -> None:
        """`under_way` and `within_hosts` are the lane's own, which change; `more_time` is what a user would write."""
        super().__init__(session, warn_after)
        self._under_way = under_way
        self._within_hosts = within_hosts
        self._more_time = more_time

    @property
    def step(self) -> int:
        return self._session.step

    def until(self, pending: Pending, timeout: float) -> None:
        """Return when the pending has landed."""
        before = self._session.said
        self.sleep(pending.landed, timeout, pending, pending.bucket)
        if pending.succeeded:  # otherwise the wait goes on, for the others' word
            self._session.resume(before)

    def fail(self, what: str, bucket: int, error: RuntimeError) -> NoReturn:
        """The transport reported an error: it closes a connection, but does not say whose."""
        self._session.at(Phase.WAITING, bucket)
        culprits, views = self._session.liveness.investigate()
        self._give_up(culprits, views, what, bucket, error=error)

    def name_lost(self, what: str, error: RuntimeError) -> None:
        """Others' collective failed: raise `PeerLost` if a rank is gone, else return, after two seconds at most."""
        culprits, views = self._session.liveness.investigate()
        gone = [rank for rank in culprits if rank in views and views[rank].gone]
        if any(views[rank].state.phase != Phase.LEFT for rank in gone):
            self._give_up(gone, views, what, -1, error=error)

    def lose(self, culprits: list[int], views: PeerViews, awaited: Pending) -> NoReturn:
        self._give_up(culprits, views, awaited.what, awaited.bucket)

    def lose_patience(self, views: PeerViews, awaited: Pending, waited: float) -> NoReturn:
        culprits = self.blamed(views, late(views, self.step))
        self._give_up(culprits, views, awaited.what, awaited.bucket, waited=waited)

    def warn(self, views: PeerViews, awaited: Pending, waited: float) -> None:
        session = self._session
        bucket, what = self._stuck(awaited.what, awaited.bucket)
        blamed = self.blamed(views, late(views, self.step))
        who = session.describe_peers(views, blamed) or self._of_whom_nothing_is_heard(views) or "every rank is here"
        if absent := session.liveness.absent:
            blamed, who = absent, f"{listed(session.global_ranks(absent))} did not come yet"
        text = f"{session.place(bucket)} has waited {waited:.0f} s for {what}: {who}"
        session.noticed(text, session.global_ranks(blamed))
        warnings.warn(text, stacklevel=5)

    def _give_up(
        self,
        culprits: list[int],
        views: PeerViews,
        what: str,
        bucket: int,
        waited: float = 0.0,
        error: RuntimeError | None = None,
    ) -> NoReturn:
        """Say so, then raise what fits."""
        session = self._session
        others = [rank for rank in culprits if rank != session.groups.rank]
        # One may have ended since it was looked at: whoever told us of it has seen that.
        views = {**views, **{rank: view for rank, view in session.liveness.peer_views().items() if rank in others}}
        missing = any(is_lost(views, rank) for rank in others)
        session.fail(tuple(culprits), lost=missing)
        session.groups.abort()
        for team in self._within_hosts:
            team.abandon()
        bucket, name = self._stuck(what, bucket)
        session.got_stuck(bucket)
        here, who = session.place(bucket), session.describe_culprits(views, others)
        if missing:
            raise PeerLost(
                f"{here} {who}, while this rank was in {name}. The step cannot be completed. {way_out(views, others)}",
                session.global_ranks(others),
            ) from error
        took = f"waited {waited:.1f} s for {name}" if waited else f"waited for {name}"
        several = len(session.liveness.hosts) > 1
        network = "Look at the network between the hosts" if several else "Look at the other ranks' logs"
        if others:
            why = f"{took}: {who}. Look at what that rank does there; {JOIN}"
        elif culprits:
            why = f"the others gave up waiting for this rank, which came too late to {name}. Look at what held it up"
        elif error is None and session.liveness.store_is_mute:
            why = f"{took}: the store in which the ranks meet does not answer; see whether its process is stopped"
        elif error is None and unheard(views)[0]:
            why = (
                f"{took}: {self._of_whom_nothing_is_heard(views)}, and nothing shows that a process ended: the network "
                f"stands still, or a host has no power. {network}"
            )
        elif error is None:
            why = f"{took}: every rank is here, but the data does not arrive. {network}"
        else:
            why = f"the transport failed in {name} ({first_line(error)}), though every rank is alive. {network}"
        raise SyncTimeout(
            f"{here} {why}, or allow more time with {self._more_time}", session.global_ranks(culprits)
        ) from error

    def _of_whom_nothing_is_heard(self, views: PeerViews) -> str:
        silent, silent_s = unheard(views)
        who = listed(self._session.global_ranks(silent))
        return f"nothing was heard of {who} for {silent_s:.0f} s" if silent else ""

    def _stuck(self, what: str, bucket: int) -> tuple[int, str]:
        """The oldest bucket that has not come through, or else what is being waited for; with its name."""
        buckets = [each for each in list(self._under_way) if each.bucket >= 0]
        stuck = next((b.bucket for b in buckets if not b.succeeded and (b.on_host or not b.landed(0))), bucket)
        return stuck, self._session.describe(stuck) if stuck >= 0 else what


def first_line(error: BaseException) -> str:
    """Return what an error says, in a sentence."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
