"""How much each rank's gradient counts: what a bucket carries, and what its sum is multiplied by. Pure.

With n ranks, k micro-batches in a window, weights w and j micro-batches done:

    a rank's bucket carries   w·g / (n·k·u)
    the sum is multiplied by  n·k·u / Σ w·j

u is a power of two near the mean weight of the last step, so that w·g does not overflow in a half type.
With equal weights and full windows the second line is 1, nothing is multiplied, and the bits are DDP's.
"""

from __future__ import annotations

import math

from gradsync.guard.header import Flag, Headers
from gradsync.plan import Combine


class Weighting:
    """This rank's weight in the step under way, and the arithmetic around it."""

    def __init__(self, size: int, k: int, combine: Combine) -> None:
        self._size = size
        self._k = k
        self._combine = combine
        self.unit = 1.0  # agreed: follows from the last header
        self._used_unit = 1.0  # the one in this step's buckets
        self.weight: float | None = None  # None: the user said nothing

    def announced(self, flags: Flag) -> tuple[float, Flag]:
        """What the header says: the weight, and whether the user set it."""
        if self.weight is not None:
            flags |= Flag.WEIGHTED
        if flags & (Flag.SHADOW | Flag.ABORTED):
            return 0.0, flags
        return 1.0 if self.weight is None else self.weight, flags

    def scale(self) -> float:
        """What this rank multiplies its gradients by before they travel."""
        if self._combine == "sum":
            return 1.0
        self._used_unit = self.unit
        weight = 1.0 if self.weight is None else self.weight
        return weight / (self._size * self._k * self.unit)

    def factor(self, headers: Headers) -> float:
        """What the sum is multiplied by when it is back."""
        total = headers.total_weight()
        if self._combine == "sum" or total == 0:
            return 1.0
        return self._size * self._k * self._used_unit / total

    def follow(self, headers: Headers) -> None:
        """Choose the unit for what comes next; equal on all ranks."""
        mean = headers.total_weight() / (self._size * self._k)
        weighted = bool(headers.flagged(Flag.WEIGHTED)) and mean > 0
        self.unit = 2.0 ** math.floor(math.log2(mean)) if weighted else 1.0
