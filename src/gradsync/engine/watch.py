"""The watch over the replicas, as a step sees it: digest, announce, hear, and then all act at once.

Off with one rank alone, and where the guard says so. Paused inside join(), where ranks that are out of data do not
step. Paces whose replicas differ by design never ask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.amp import GradScaler
from torch.optim import Optimizer

from gradsync.engine.bucket import Entry
from gradsync.engine.inquest import Inquest
from gradsync.engine.vitals import Vitals
from gradsync.guard.findings import Findings
from gradsync.guard.header import NO_VITALS, Headers
from gradsync.policy import Guard
from gradsync.transport.lane import Lane


class Watch:
    """One per attach."""

    def __init__(
        self,
        entries: Sequence[Entry],
        optimizers: Sequence[Optimizer],
        scaler: GradScaler | None,
        guard: Guard,
        findings: Findings,
        size: int,
    ) -> None:
        self._on = guard.drift != "off" and size > 1
        self.paused = False
        self._vitals = Vitals(entries, optimizers, scaler)
        self._inquest = Inquest(self._vitals, guard.drift, findings)

    def announce(self) -> tuple[bytes, float]:
        """What the header of this step says of the replica, and of its loss scale."""
        if not self._on:
            return NO_VITALS, 0.0
        if self.paused:
            self._vitals.forget()
        return self._vitals.announce()

    def take(self, step: int) -> None:
        """Digest a share of the replica, which is at rest; best while something travels."""
        if self._on and not self.paused:
            self._vitals.take(step)

    def replaced(self) -> None:
        """Entries have other parameters from now on: look anew at what is digested."""
        self._vitals.replaced()

    def made_equal(self) -> None:
        """All replicas are equal from now on: what was digested before says nothing any more."""
        self._vitals.forget()

    def hear(self, headers: Headers, lane: Lane) -> Callable[[], None]:
        """Compare what all ranks said in one header; returns what they do about it, all at the same place."""
        if not self._on:
            return _nothing
        suspicion = self._vitals.hear(headers)
        scales = [head.loss_scale for head in headers.heads]

        def act() -> None:
            self._inquest.compare_scales(lane, scales)
            if suspicion is not None:
                self._inquest.hold(lane, suspicion)

        return act


def _nothing() -> None: ...
