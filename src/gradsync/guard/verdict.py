"""Whether a step counts: every rank reads the same headers and comes to the same verdict."""

from __future__ import annotations

import enum
import warnings

from gradsync.errors import GradSyncError, listed
from gradsync.guard.findings import Findings, Found
from gradsync.guard.header import Flag, Headers, check_headers
from gradsync.policy import Guard
from gradsync.transport.lane import Lane

TOO_MANY = 10  # batches in a row that were dropped because something raised
_SHOWN = 3  # ranks in a sentence
_RAISED = {Flag.FORWARD: "forward raised", Flag.LOADER: "the loader raised"}


class Verdict(enum.Enum):
    """What every rank does with the step."""

    COUNTS = enum.auto()
    DROPPED = enum.auto()
    RAISES = enum.auto()  # dropped, and everybody is told by an exception


def step_verdict(
    lane: Lane, guard: Guard, headers: Headers, names: list[str], findings: Findings
) -> tuple[Verdict, str]:
    """The verdict, and what an exception has to say.

    If the ranks are not in the same step at all, every rank raises `Disagreement`.
    """
    ranks = lane.groups.ranks
    if aborted := headers.flagged(Flag.ABORTED):
        _tell_aborted(lane, {ranks[rank]: Flag(headers.heads[rank].flags) for rank in aborted}, findings)
        return Verdict.DROPPED, ""
    check_headers(headers, names, ranks)
    found = nonfinite(headers, names, ranks)
    if found is None or guard.nonfinite == "allow":
        return Verdict.COUNTS, ""
    return spoiled(lane, guard, found, findings)


def interrupted(flags: dict[int, Flag]) -> str:
    """What raised where.

    >>> interrupted({0: Flag.ABORTED, 2: Flag.ABORTED, 3: Flag.ABORTED | Flag.FORWARD})
    'backward did not finish on ranks 0 and 2, and forward raised on rank 3'
    """
    kinds: dict[str, list[int]] = {}
    for rank, flag in flags.items():
        for kind in _kinds(flag):
            kinds.setdefault(kind, []).append(rank)
    return ", and ".join(f"{kind} on {listed(ranks)}" for kind, ranks in kinds.items())


def _kinds(flag: Flag) -> list[str]:
    kinds = [text for kind, text in _RAISED.items() if flag & kind]
    return kinds or ["backward did not finish"]


def _tell_aborted(lane: Lane, flags: dict[int, Flag], findings: Findings) -> None:
    """Warn, or raise if nothing is trained at all: every rank does the same."""
    what = interrupted(flags)
    error, findings.error = findings.error, ""
    if findings.aborted() >= TOO_MANY:
        raise GradSyncError(
            f"{lane.place()} {TOO_MANY} batches in a row came to nothing on every rank, since {what} in the last of "
            f"them{_in_brackets(error)}: look at what raises there"
        )
    warnings.warn(f"{lane.place()} {what}{_in_brackets(error)}: the batch is skipped on every rank", stacklevel=3)


def _in_brackets(error: str) -> str:
    """What this rank's exception says, if it was this one's."""
    return f" ({error})" if error else ""


def spoiled(lane: Lane, guard: Guard, found: Found, findings: Findings) -> tuple[Verdict, str]:
    """What a NaN or Inf comes to, where the guard allows none; and what an exception has to say."""
    findings.tell(lane.step, "nonfinite", found.text, found.ranks, found.parameter, found.num_elements)
    if guard.nonfinite == "raise":
        return Verdict.RAISES, found.text
    if findings.skipped(lane.step, found):
        report = findings.report()
        findings.tell(lane.step, "skips", report, found.ranks, found.parameter, findings.skipped_steps)
        return Verdict.RAISES, report
    warnings.warn(f"{lane.place()} {found.text}: the step is skipped on every rank", stacklevel=3)
    return Verdict.DROPPED, ""


def nonfinite(headers: Headers, names: list[str], ranks: tuple[int, ...]) -> Found | None:
    """Where a NaN or Inf is, if anywhere: on which ranks, the first parameter of each, and how many elements of it."""
    found = [(rank, head) for rank, head in zip(ranks, headers.heads, strict=True) if head.nonfinite >= 0]
    if not found:
        return None
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
