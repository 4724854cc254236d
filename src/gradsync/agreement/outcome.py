"""The outcome of a step: every rank reads the same headers and concludes the same.

What was found wrong so far: counted for `stats()`, told to whoever listens, and after too many skips reported.

Every rank comes to the same findings, since all read the same headers.
"""

from __future__ import annotations

import enum
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gradsync.agreement.header import Flag, Headers, Note
from gradsync.agreement.same_step import check_headers
from gradsync.errors import GradSyncError, listed
from gradsync.plan.guard import Guard
from gradsync.trace.lines import Health
from gradsync.transport.lane import Lane

_SHOWN_SKIPS = 3  # skips in a report


class Found(NamedTuple):
    """A NaN or Inf, and where it is."""

    text: str  # where it is, as part of a sentence
    ranks: list[int]  # who brought it; none if compression made it
    parameter: str | None
    num_elements: int | None


class HealthLog:
    """A log of what was found wrong since attach, whatever plans there were."""

    def __init__(self, max_skips: int) -> None:
        self._heard: list[Callable[[Health], None]] = []
        self.skipped_steps = 0
        self.drift_findings = 0
        self._error = ""  # this rank's exception in the batch that all are about to drop, as far as it is known
        self._num_aborted = 0  # batches in a row in which a rank raised
        self._max_skips = max_skips
        self._in_a_row = 0
        self._last: deque[str] = deque(maxlen=_SHOWN_SKIPS)

    def tell(
        self, step: int, what: str, text: str, ranks: Sequence[int] = (), parameter: str | None = None,
        count: int | None = None,
    ) -> None:  # fmt: skip
        """Let the listeners know."""
        for hear in self._heard:
            hear(Health(step, what, list(ranks), parameter, count, text))

    def listen(self, hear: Callable[[Health], None]) -> None:
        """Tell this one of all that is found from now on."""
        self._heard.append(hear)

    def raised(self, error: str) -> None:
        """Note what this rank's batch, which all are about to drop, raised."""
        self._error = error

    def take_error(self) -> str:
        """Return what this rank's dropped batch raised, told once."""
        error, self._error = self._error, ""
        return error

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

    def drifted(self) -> None:
        """Replicas were found to differ."""
        self.drift_findings += 1

    def report(self) -> str:
        """The sentence that says why training cannot go on."""
        steps = "1 step was" if self._in_a_row == 1 else f"{self._in_a_row} steps in a row were"
        return (
            f"{steps} skipped because of NaN or Inf: {', '.join(self._last)}. Lower the learning rate or the loss "
            "scale, look at the data of these ranks, or allow more skips with gs.Guard(max_skips=...)"
        )

    def stats(self) -> dict[str, float | int | str | None]:
        return {"skipped_steps": self.skipped_steps, "drift_findings": self.drift_findings}


TOO_MANY = 10  # batches in a row that were dropped because something raised
_SHOWN = 3  # ranks in a sentence
_RAISED = {Flag.FORWARD: "forward raised", Flag.LOADER: "the loader raised"}


class Outcome(enum.Enum):
    """The conclusion that all ranks draw for the step."""

    COUNTS = enum.auto()
    DROPPED = enum.auto()
    RAISES = enum.auto()  # dropped, and everybody is told by an exception


def step_outcome(
    lane: Lane, guard: Guard, headers: Headers, names: list[str], health_log: HealthLog
) -> tuple[Outcome, str]:
    """The outcome, and what an exception has to say.

    If the ranks are not in the same step at all, every rank raises `Disagreement`.
    """
    ranks = lane.groups.ranks
    if headers.flags & Flag.ABORTED:
        aborted = headers.flagged(Flag.ABORTED)
        _tell_aborted(lane, {ranks[rank]: int(headers.heads[rank].flags) for rank in aborted}, health_log)
        return Outcome.DROPPED, ""
    if not headers.same_place:
        check_headers(headers, names, ranks)
    found = nonfinite(headers, names, ranks)
    if found is None or guard.nonfinite == "allow":
        return Outcome.COUNTS, ""
    return spoiled(lane, guard, found, health_log)


def interrupted(flags: dict[int, int]) -> str:
    """The words for what raised on which ranks.

    >>> interrupted({0: Flag.ABORTED, 2: Flag.ABORTED, 3: Flag.ABORTED | Flag.FORWARD})
    'backward did not finish on ranks 0 and 2, and forward raised on rank 3'
    """
    kinds: dict[str, list[int]] = {}
    for rank, flag in flags.items():
        for kind in _kinds(flag):
            kinds.setdefault(kind, []).append(rank)
    return ", and ".join(f"{kind} on {listed(ranks)}" for kind, ranks in kinds.items())


def _kinds(flag: int) -> list[str]:
    kinds = [text for kind, text in _RAISED.items() if flag & kind]
    return kinds or ["backward did not finish"]


def _tell_aborted(lane: Lane, flags: dict[int, int], health_log: HealthLog) -> None:
    """Warn, or raise if nothing is trained at all: every rank does the same."""
    what = interrupted(flags)
    error = health_log.take_error()
    if health_log.aborted() >= TOO_MANY:
        raise GradSyncError(
            f"{lane.place()} {TOO_MANY} batches in a row came to nothing on every rank, since {what} in the last of "
            f"them{_in_brackets(error)}: look at what raises there"
        )
    warnings.warn(f"{lane.place()} {what}{_in_brackets(error)}: the batch is skipped on every rank", stacklevel=3)


def _in_brackets(error: str) -> str:
    """Return what this rank's exception says, if it was this one's."""
    return f" ({error})" if error else ""


def spoiled(lane: Lane, guard: Guard, found: Found, health_log: HealthLog) -> tuple[Outcome, str]:
    """Return what a NaN or Inf comes to, where the guard allows none; and what an exception has to say."""
    health_log.tell(lane.step, "nonfinite", found.text, found.ranks, found.parameter, found.num_elements)
    if guard.nonfinite == "raise":
        return Outcome.RAISES, found.text
    if health_log.skipped(lane.step, found):
        report = health_log.report()
        health_log.tell(lane.step, "skips", report, found.ranks, found.parameter, health_log.skipped_steps)
        return Outcome.RAISES, report
    warnings.warn(f"{lane.place()} {found.text}: the step is skipped on every rank", stacklevel=3)
    return Outcome.DROPPED, ""


def nonfinite(headers: Headers, names: list[str], ranks: tuple[int, ...]) -> Found | None:
    """The NaN or Inf of this step, if any: its ranks, the first parameter of each, and how many elements of it."""
    if not headers.notes & Note.NONFINITE:
        return None
    found = [(rank, head) for rank, head in zip(ranks, headers.heads, strict=True) if head.nonfinite >= 0]
    parts = [
        f"rank {rank} has NaN or Inf in the gradient of {names[head.nonfinite]}{_counted(head.num_nonfinite)}"
        for rank, head in found[:_SHOWN]
    ]
    more = [rank for rank, _ in found[_SHOWN:]]
    text = ", ".join(parts) + (f", and so have {listed(more)}" if more else "")
    first = found[0][1]
    return Found(text, [rank for rank, _ in found], names[first.nonfinite], first.num_nonfinite or None)


def _counted(count: int) -> str:
    return "" if not count else f" ({count} element{'s' if count > 1 else ''})"
