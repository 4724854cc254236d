"""Whether a step counts: every rank reads the same headers and comes to the same verdict."""

from __future__ import annotations

import enum
import warnings

from gradsync.errors import listed
from gradsync.guard.header import Flag, Headers, check_headers
from gradsync.policy import Guard
from gradsync.transport.lane import Lane


class Verdict(enum.Enum):
    """What every rank does with the step."""

    COUNTS = enum.auto()
    DROPPED = enum.auto()
    RAISES = enum.auto()  # dropped, and everybody is told by an exception


def step_verdict(lane: Lane, guard: Guard, headers: Headers, names: list[str]) -> Verdict:
    """The verdict; if the ranks are not in the same step at all, every rank raises `Disagreement`."""
    ranks = lane.groups.ranks
    if aborted := headers.flagged(Flag.ABORTED):
        who = listed([ranks[rank] for rank in aborted])
        warnings.warn(
            f"{lane.place()} backward did not finish on {who}: the batch is skipped on every rank", stacklevel=2
        )
        return Verdict.DROPPED
    check_headers(headers, names, ranks)
    found = nonfinite(headers, names, lane)
    if found is None or guard.nonfinite == "allow":
        return Verdict.COUNTS
    return overflown(lane, guard, found)


def overflown(lane: Lane, guard: Guard, found: str) -> Verdict:
    """What a NaN or Inf comes to, where the guard allows none; `found` says where it is."""
    if guard.nonfinite == "raise":
        return Verdict.RAISES
    warnings.warn(f"{lane.place()} {found}: the step is skipped on every rank", stacklevel=3)
    return Verdict.DROPPED


def nonfinite(headers: Headers, names: list[str], lane: Lane) -> str | None:
    """Where a NaN or Inf was found, as part of a sentence."""
    for rank, head in enumerate(headers.heads):
        if head.nonfinite >= 0:
            return f"rank {lane.groups.ranks[rank]} has NaN or Inf in the gradient of {names[head.nonfinite]}"
    return None
