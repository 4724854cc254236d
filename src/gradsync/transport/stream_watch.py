"""Looks after what is under way on GPUs, where no thread of the host waits that would notice a death.

Note [Nobody waits]
    host      ── launch ── launch ── backward ends ── header ── step ── loss.item(), in C ────────────────────
    GPU              └── all-reduce ──────────── rank 2 died: its kernel waits for ever ──────✕ aborted
    liveness  ──┴───────┴───────┴───────┴───────┴───────┴───────┴─── rank 2 is gone: give up ─┘

    A rank hears of a death where it waits for the others on the host, which is once a step. A rank that dies after its
    header leaves the others' kernels waiting, and a loop that reads the loss with them: there nobody could raise. So
    the liveness thread looks at the oldest work that its GPU is not through with. What it finds is raised by the next
    call that comes back to us; the aborted communicator lets the loop come that far.
"""

from __future__ import annotations

import threading
from collections import deque

from gradsync.errors import GradSyncError
from gradsync.transport.awake_clock import AwakeClock
from gradsync.transport.blame import PeerViews, lost, stopped
from gradsync.transport.heartbeat import Phase
from gradsync.transport.pending import Pending, Promise
from gradsync.transport.session import Session
from gradsync.transport.waiting import GRACE_S, LaneWait


class StreamWatch:
    """One lane's watch over its works on streams; `look` is called by the liveness thread."""

    def __init__(self, session: Session, under_way: deque[Pending], wait: LaneWait, timeout: float) -> None:
        """`under_way` is the lane's own, which changes; `timeout` bounds each work."""
        self._session, self._under_way, self._wait, self._timeout = session, under_way, wait, timeout
        self._oldest: Pending | None = None
        self._calls: list[int] = []  # of NCCL, by channel, at the last look
        self._clock = AwakeClock()
        self._stopped_at: float | None = None
        self._is_curious = False
        self._investigation: threading.Thread | None = None

    def look(self) -> None:
        """Give up if the oldest work cannot end any more, or takes too long."""
        if not self._session.groups.on_streams:
            return
        calls = [channel.num_calls for channel in self._session.groups.on_streams]
        oldest = next((each for each in list(self._under_way) if not each.on_host and not each.landed(0)), None)
        if any(number % 2 for number in calls):  # the host waits in NCCL
            oldest = self._oldest if calls == self._calls else Promise("a call of NCCL", 0, -1)
        self._calls = calls
        if oldest is not self._oldest:
            self._oldest, self._clock, self._stopped_at = oldest, AwakeClock(), None
            self._be_curious(False)
            return
        # Whoever waits on the host notices more, and sooner.
        if oldest is None or self._session.doomed is not None or self._session.said.phase >= Phase.WAITING:
            return
        if self._investigation is not None and self._investigation.is_alive():
            return
        try:
            self._judge(oldest, self._clock.look(), self._session.liveness.peer_views())
        except GradSyncError as error:
            self._session.doom(error)

    def _investigate(self, oldest: Pending, failure: str) -> None:
        """Say whose fault it was, which takes a moment: not on the thread that beats."""
        try:
            self._wait.fail(oldest.what, oldest.bucket, RuntimeError(failure))
        except GradSyncError as error:
            self._session.doom(error)

    def _be_curious(self, curious: bool) -> None:
        if curious != self._is_curious:
            self._is_curious = curious
            self._session.liveness.watch(curious)

    def _judge(self, oldest: Pending, waited: float, views: PeerViews) -> None:
        self._be_curious(True)
        if culprits := lost(views, self._session.step):
            self._wait.lose(culprits, views, oldest)
        if suspects := stopped(views):
            self._stopped_at = waited if self._stopped_at is None else self._stopped_at
            if waited - self._stopped_at >= GRACE_S:
                self._wait.lose(self._wait.blamed(views, suspects), views, oldest)
        for channel in self._session.groups.on_streams:
            if (failure := channel.failure()) is not None:
                self._investigation = threading.Thread(target=self._investigate, args=(oldest, failure), daemon=True)
                self._investigation.start()
        if waited >= self._timeout:
            self._wait.lose_patience(views, oldest, waited)
