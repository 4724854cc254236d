"""What was found wrong so far: counted for `stats()`, told to whoever listens, and after too many skips reported.

Every rank comes to the same findings, since all read the same headers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gradsync.trace.lines import Health

_SHOWN = 3  # skips in a report


class Found(NamedTuple):
    """A NaN or Inf."""

    text: str  # where it is, as part of a sentence
    ranks: list[int]  # who brought it; none if compression made it
    parameter: str | None
    num_elements: int | None


def _ignore(line: Health) -> None: ...


class Findings:
    """Kept while the plan changes."""

    def __init__(self, max_skips: int) -> None:
        self.noted: Callable[[Health], None] = _ignore
        self.skipped_steps = 0
        self.drift_findings = 0
        self.error = ""  # this rank's exception in the batch that all are about to drop, as far as it is known
        self._num_aborted = 0  # batches in a row in which a rank raised
        self._max_skips = max_skips
        self._in_a_row = 0
        self._last: deque[str] = deque(maxlen=_SHOWN)

    def tell(
        self, step: int, what: str, text: str, ranks: Sequence[int] = (), parameter: str | None = None,
        count: int | None = None,
    ) -> None:  # fmt: skip
        """Let the listener know."""
        self.noted(Health(step, what, list(ranks), parameter, count, text))

    def aborted(self) -> int:
        """A batch was dropped because a rank raised; how many there were in a row."""
        self._num_aborted += 1
        return self._num_aborted

    def skipped(self, step: int, found: Found) -> bool:
        """A step was skipped; True if there were too many in a row."""
        self._num_aborted = 0
        self.skipped_steps += 1
        self._in_a_row += 1
        self._last.append(f"in step {step} {found.text}")
        return self._in_a_row >= self._max_skips

    def counted(self) -> None:
        """A step counts: the next skip is the first in a row."""
        self._in_a_row = self._num_aborted = 0
        self._last.clear()

    def report(self) -> str:
        """Why it cannot go on."""
        steps = "1 step was" if self._in_a_row == 1 else f"{self._in_a_row} steps in a row were"
        return (
            f"{steps} skipped because of NaN or Inf: {', '.join(self._last)}. Lower the learning rate or the loss "
            "scale, look at the data of these ranks, or allow more skips with gs.Guard(max_skips=...)"
        )

    def stats(self) -> dict[str, float | int | str | None]:
        return {"skipped_steps": self.skipped_steps, "drift_findings": self.drift_findings}
