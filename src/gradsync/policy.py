"""What to do when something is wrong, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

_MAX_S = 1e7  # about four months: more overflows the transports' clocks
_MIN_DEAD_S = 1.0  # ranks beat four times a second
NonFinitePolicy = Literal["allow", "skip", "raise"]


@dataclass(frozen=True)
class Guard:
    """Bounds on every wait, and what a NaN does.

    Args:
        timeout: Seconds a rank that is alive may take to arrive; then `SyncTimeout`. None: the group's.
        dead_after: Seconds without a sign of life from a rank; then `PeerLost`.
        warn_after: Seconds of waiting after which a warning names the rank and what it does.
        nonfinite: A NaN or Inf in a gradient: "allow" lets it travel (as DDP does), "skip" makes every
            rank drop the step, "raise" makes every rank raise `NonFinite`. The last two read one flag
            per bucket on the host, which on a GPU waits for the gradients.

    >>> Guard(timeout=30).dead_after
    10.0
    """

    timeout: float | None = None
    dead_after: float = 10.0
    warn_after: float = 30.0
    nonfinite: NonFinitePolicy = "allow"

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
