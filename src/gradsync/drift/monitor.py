"""The drift monitor over the replicas, as a step sees it: digest, announce, hear, and then all act at once.

Off with one rank alone, and where the guard says so. Paused inside join(), where ranks that are out of data do not
step. Paces whose replicas differ by design never ask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.amp import GradScaler
from torch.optim import Optimizer

from gradsync.agreement.header import NO_REPLICA_DIGEST, Headers
from gradsync.agreement.outcome import HealthLog
from gradsync.drift.diagnosis import Diagnosis
from gradsync.drift.digests import ReplicaDigests
from gradsync.engine.bucket import Entry
from gradsync.plan.guard import Guard
from gradsync.transport.lane import Lane


class DriftMonitor:
    """One per attach."""

    def __init__(
        self,
        entries: Sequence[Entry],
        optimizers: Sequence[Optimizer],
        scaler: GradScaler | None,
        guard: Guard,
        health_log: HealthLog,
        size: int,
    ) -> None:
        self._on = guard.drift != "off" and size > 1
        self.paused = False
        self._replica_digests = ReplicaDigests(entries, optimizers, scaler)
        self._diagnosis = Diagnosis(self._replica_digests, guard.drift, health_log)

    def announce(self) -> tuple[bytes, float]:
        """What the header of this step says of the replica, and of its loss scale."""
        if not self._on:
            return NO_REPLICA_DIGEST, 0.0
        if self.paused:
            self._replica_digests.forget()
        return self._replica_digests.announce()

    def take(self, step: int) -> None:
        """Digest a share of the replica, which is at rest; best while something travels."""
        if self._on and not self.paused:
            self._replica_digests.take(step)

    def replaced(self) -> None:
        """Entries have other parameters from now on: look anew at what is digested."""
        self._replica_digests.replaced()

    def made_equal(self) -> None:
        """All replicas are equal from now on: what was digested before says nothing any more."""
        self._replica_digests.forget()

    def hear(self, headers: Headers, lane: Lane) -> Callable[[], None]:
        """Compare what all ranks said in one header; returns what they do about it, all at the same place."""
        if not self._on:
            return _nothing
        mismatch = self._replica_digests.hear(headers)
        scales = [head.loss_scale for head in headers.heads]

        def act() -> None:
            self._diagnosis.compare_scales(lane, scales)
            if mismatch is not None:
                self._diagnosis.investigate(lane, mismatch)

        return act


def _nothing() -> None: ...
