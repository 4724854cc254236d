"""A guard as data: what to do when something is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

_MAX_S = 1e7  # about four months: more overflows the transports' clocks
_MIN_DEAD_S = 1.0  # ranks beat four times a second
NonFinitePolicy = Literal["allow", "skip", "raise"]
DriftPolicy = Literal["off", "warn", "repair", "raise"]


@dataclass(frozen=True)
class Guard:
    """Bounds on every wait, what a NaN does, and what is done about replicas that differ.

    Args:
        timeout: Seconds a rank that is alive may take to arrive; then `SyncTimeout`. None: the group's.
        dead_after: Seconds without a sign of life from a rank; then `PeerLost`.
        warn_after: Seconds of waiting after which a warning names the rank and what it does.
        nonfinite: A NaN or Inf in a gradient: "allow" lets it travel (as DDP does), "skip" makes every
            rank drop the step, "raise" makes every rank raise `NonFinite`. The last two read one flag
            per bucket on the host, which on a GPU waits for the gradients.
        max_skips: After so many skipped steps in a row every rank raises `NonFinite` with a report.
        drift: Parameters and optimizer state are compared between the ranks in rotation, all of them within 64
            steps. A replica that differs: "warn" names it, "repair" also overwrites it with what most ranks have,
            "raise" makes every rank raise `Disagreement`. "off" compares nothing. See docs/health.md.

    >>> Guard(timeout=30).dead_after
    10.0
    """

    timeout: float | None = None
    dead_after: float = 10.0
    warn_after: float = 30.0
    nonfinite: NonFinitePolicy = "allow"
    max_skips: int = 10
    drift: DriftPolicy = "warn"

    def __post_init__(self) -> None:
        for name in ("timeout", "dead_after", "warn_after"):
            value = getattr(self, name)
            if value is None and name == "timeout":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MAX_S:
                raise ValueError(f"Guard: {name} must be a positive number of seconds, got {value!r}")
        if self.dead_after < _MIN_DEAD_S:
            raise ValueError(f"Guard: dead_after must be at least {_MIN_DEAD_S:g} s, got {self.dead_after!r}")
        if self.nonfinite not in get_args(NonFinitePolicy):
            raise ValueError(f'Guard: nonfinite must be "allow", "skip" or "raise", got {self.nonfinite!r}')
        if isinstance(self.max_skips, bool) or not isinstance(self.max_skips, int) or self.max_skips < 1:
            raise ValueError(f"Guard: max_skips must be a whole number of steps from 1 on, got {self.max_skips!r}")
        if self.drift not in get_args(DriftPolicy):
            raise ValueError(f'Guard: drift must be "off", "warn", "repair" or "raise", got {self.drift!r}')
