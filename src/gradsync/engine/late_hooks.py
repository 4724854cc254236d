"""Notice when every gradient arrives at the very end of backward, so that nothing can overlap: say so, once."""

from __future__ import annotations

import time
import warnings

_IN_A_ROW = 3
_LONG_S = 5e-3  # a shorter backward has nothing to gain
_LAST_PART = 0.1


class LateHooks:
    """Hears when a backward begins, when its first gradient arrives, and when it ends."""

    def __init__(self) -> None:
        self._begun_at: float | None = None
        self._first_at = 0.0
        self._in_a_row = 0  # backwards in which all gradients arrived at the end

    def begins(self, known: bool) -> None:
        """`known`: this is the beginning itself, not the first gradient of a backward that nobody announced."""
        self._begun_at = time.perf_counter() if known else None

    def first(self) -> None:
        self._first_at = time.perf_counter()

    def ends(self) -> None:
        """Of a backward whose gradients could travel while it computes."""
        if self._begun_at is None or self._in_a_row >= _IN_A_ROW:
            return
        now = time.perf_counter()
        took_s = now - self._begun_at
        late = took_s > _LONG_S and now - self._first_at < _LAST_PART * took_s
        self._in_a_row = self._in_a_row + 1 if late else 0
        if self._in_a_row == _IN_A_ROW:
            warnings.warn(
                "all gradients arrive at the end of backward, so communication cannot overlap with it; "
                "if the whole model is under torch.compile, compile its blocks instead (block.compile())",
                stacklevel=2,
            )
