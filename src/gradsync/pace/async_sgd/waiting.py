"""Waiting for the other ranks: bounded, and ending with a name.

    waiting  ├─ slice ─┼─ slice ─┼─ …         ends at once when somebody is dead or silent: its shard is gone,
             peer gave up ├── 1 s ──┤         a second after somebody gave up or left,
             timeout ────────────────────┤    and at the latest here

A rank is a worker and keeps a shard. A worker that stops while its process lives says so with `leave()`, and nobody
waits for it; but when a process dies its shard dies too, and nobody else has those parameters: that is PeerLost,
naming the rank and a parameter.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

from gradsync.errors import GradSyncError, PeerLost, SyncTimeout, listed
from gradsync.pace.async_sgd.mail import Failure
from gradsync.transport.awake_clock import Awake
from gradsync.transport.blame import Sights, account, blame, is_lost, lost, stopped
from gradsync.transport.heartbeat import Phase
from gradsync.transport.lane import Lane

_SLICE_S = 0.1
_GRACE_S = 1.0  # for our answer to arrive after a peer gave up or left: it may have sent it before
_ANY_STEP = sys.maxsize  # workers are at different steps: that one is ahead excuses nothing


class PeerWait:
    """Waits, and knows whom to name."""

    def __init__(
        self, lane: Lane, timeout: float, shards: Sequence[Sequence[str]], failure: Callable[[], Failure | None]
    ) -> None:
        self._lane = lane
        self._timeout = timeout
        self._shards = shards  # the parameters of each rank's
        self._failure = failure

    def wait(self, landed: Callable[[float], bool], what: str, holding_up: Callable[[], list[int]]) -> None:
        """Return when `landed(slice_s)` says so; `holding_up` tells who is late when that takes too long."""
        self.check(what)
        if landed(_SLICE_S):
            return
        before = self._lane.liveness.state
        self._lane.at(Phase.WAITING)
        self._lane.liveness.watch(True)
        try:
            self._watch(landed, what, holding_up)
        finally:
            self._lane.liveness.watch(False)
        self._lane.at(before.phase, before.bucket)

    def check(self, what: str) -> None:
        """Raise here what has ended the receiver thread."""
        failure = self._failure()
        if failure is not None:
            self.fail(what, failure)

    def fail(self, what: str, failure: Failure) -> NoReturn:
        """A thread of ours has failed, or the transport: it closes a connection, but does not say whose."""
        error = failure.error
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        here = self._lane.place()
        if failure.ours:
            raise GradSyncError(
                f"{here} the shard of this rank failed in an update ({type(error).__name__}: {why}); the optimizer "
                "must take a step without a closure, from dense gradients"
            ) from error
        self._lane.at(Phase.WAITING)
        culprits, sights = self._lane.liveness.investigate()
        if culprits:
            self._mourn(culprits, sights, what, error)
        self._lane.fail()
        raise GradSyncError(
            f"{here} the transport failed in {what} ({why}), though every rank is alive. Look at the network between "
            "the hosts"
        ) from error

    def _watch(self, landed: Callable[[float], bool], what: str, holding_up: Callable[[], list[int]]) -> None:
        clock, stopped_at, warned = Awake(), None, False
        while not landed(_SLICE_S):
            self.check(what)
            waited, sights = clock.look(), self._lane.liveness.sights()
            if culprits := lost(sights, _ANY_STEP):
                self._mourn(culprits, sights, what)
            if suspects := stopped(sights):
                stopped_at = waited if stopped_at is None else stopped_at
                if waited - stopped_at >= _GRACE_S:
                    guilty, excused = blame(sights, suspects, _ANY_STEP)
                    self._mourn(guilty or excused, sights, what)
            if not warned and waited >= self._lane.warn_after:
                warned = True
                self._warn(holding_up(), sights, what, waited)
            if waited >= self._timeout:
                self._lose_patience(holding_up(), sights, what, waited)

    def _warn(self, late: list[int], sights: Sights, what: str, waited: float) -> None:
        who = self._accounts(sights, late) or "every rank is here"
        warnings.warn(f"{self._lane.place()} has waited {waited:.0f} s for {what}: {who}", stacklevel=5)

    def _mourn(self, culprits: list[int], sights: Sights, what: str, error: Exception | None = None) -> NoReturn:
        if self._lane.groups.rank in culprits:
            self._lane.fail(tuple(culprits))
            raise SyncTimeout(
                f"{self._lane.place()} the others gave up waiting for this rank, which came too late to {what}. Look "
                "at what held it up, or allow more time with gs.Guard(timeout=seconds)",
                self._lane.global_ranks(culprits),
            ) from error
        self._lane.liveness.at(self._lane.step, Phase.LOST_PEER, culprits=tuple(culprits))
        shards = "; ".join(f"{listed(self._lane.global_ranks([rank]))} kept {self._shard(rank)}" for rank in culprits)
        raise PeerLost(
            f"{self._lane.place()} {self._accounts(sights, culprits)}, while this rank was in {what}; {shards}, which "
            "no other rank holds. Exit with an error and let the launcher restart all ranks (torchrun "
            "--max-restarts) from the last checkpoint",
            self._lane.global_ranks(culprits),
        ) from error

    def _lose_patience(self, culprits: list[int], sights: Sights, what: str, waited: float) -> NoReturn:
        others = [rank for rank in culprits if rank in sights]
        self._lane.fail(tuple(others))
        who = self._accounts(sights, others) or "every rank is here, but no answer arrives"
        raise SyncTimeout(
            f"{self._lane.place()} waited {waited:.1f} s for {what}: {who}. Look at what that rank does there, have "
            "it call sync.drain() when it has no more data, or allow more time with gs.Guard(timeout=seconds)",
            self._lane.global_ranks(others),
        )

    def _accounts(self, sights: Sights, ranks: list[int]) -> str:
        return "; ".join(
            account(
                sights[rank],
                listed(self._lane.global_ranks([rank])),
                self._lane.liveness.pid(rank),
                is_lost(sights, rank),
            )
            for rank in ranks
            if rank in sights
        )

    def _shard(self, rank: int) -> str:
        names = self._shards[rank]
        if not names:
            return "no parameter, but the clocks that all wait for"
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"the shard of {names[0]!r}{more}"
