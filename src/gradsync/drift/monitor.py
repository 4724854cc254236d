"""The drift monitor over the replicas, as a step sees it: digest, announce, hear, and then all act at once.

Off with one rank alone, and where the guard says so. Paused inside join(), where ranks that are out of data do not
step. Paces whose replicas differ by design never ask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch.amp import GradScaler
from torch.optim import Optimizer

from gradsync.agreement.header import NO_REPLICA_DIGEST, Flag, Head, Headers
from gradsync.agreement.outcome import HealthLog
from gradsync.drift.diagnosis import Diagnosis
from gradsync.drift.digests import ReplicaDigests
from gradsync.engine.bucket import GradEntry
from gradsync.engine.listeners import Listeners
from gradsync.plan.guard import Guard
from gradsync.transport.lane import Lane


class DriftMonitor:
    """Compares the replicas of one attach in every step."""

    def __init__(
        self,
        entries: Sequence[GradEntry],
        optimizers: Sequence[Optimizer],
        scaler: GradScaler | None,
        guard: Guard,
        health_log: HealthLog,
        size: int,
    ) -> None:
        self.is_on = guard.drift != "off" and size > 1
        self._paused = False
        self._replica_digests = ReplicaDigests(entries, optimizers, scaler)
        self._diagnosis = Diagnosis(self._replica_digests, guard.drift, health_log)

    def announce(self) -> tuple[bytes, float]:
        """Return what the header of this step says of the replica, and of its loss scale."""
        if not self.is_on:
            return NO_REPLICA_DIGEST, 0.0
        if self._paused:
            self._replica_digests.forget()
        return self._replica_digests.announce()

    def write(self, head: Head) -> Head:
        """Put what this rank announces into the header itself."""
        replica_digest, loss_scale = self.announce()
        if head.flags & Flag.SHADOW:
            loss_scale = 0.0  # its scaler stands still, and follows when join() ends
        return head._replace(replica_digest=replica_digest, loss_scale=loss_scale)

    def take(self, step: int, silent: bool = False) -> None:
        """Digest a share of the replica, which is at rest; best while something travels.

        `silent`: this replica is rightly unlike the others for now.
        """
        if self.is_on and not self._paused:
            self._replica_digests.take(step, silent)

    def pause(self, paused: bool) -> None:
        """Pause, or go on: inside join() some ranks do not step, and replicas differ for a while."""
        self._paused = paused

    def replaced(self) -> None:
        """Entries have other parameters from now on: look anew at what is digested."""
        self._replica_digests.replaced()

    def made_equal(self) -> None:
        """Take all replicas as equal from now on: what was digested before says nothing any more."""
        self._replica_digests.forget()

    def hear(self, headers: Headers, lane: Lane) -> Callable[[], None]:
        """Compare what all ranks said in one header; returns what they do about it, all at the same place."""
        if not self.is_on:
            return _nothing
        mismatch = self._replica_digests.hear(headers)
        if mismatch is None and not headers.scales_differ:
            return _nothing
        scales = [head.loss_scale for head in headers.heads]

        def act() -> None:
            self._diagnosis.compare_scales(lane, scales)
            if mismatch is not None:
                self._diagnosis.investigate(lane, mismatch)

        return act

    def listen(self, listeners: Listeners, lane: Lane) -> None:
        """Hear of the steps that these listeners hear of."""
        if self.is_on:
            listeners.add(announce=self.write, header_came=partial(self._header_came, lane), joining=self.pause)

    def _header_came(self, lane: Lane, headers: Headers) -> Callable[[], None] | None:
        act = self.hear(headers, lane)
        self.take(lane.session.step)  # the last buckets still travel
        return None if act is _nothing else act


def _nothing() -> None: ...
