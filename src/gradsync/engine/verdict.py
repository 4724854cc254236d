"""Whether a step counts: every rank reads the same headers and comes to the same verdict."""

from __future__ import annotations

import warnings

from gradsync.errors import NonFinite, listed
from gradsync.guard.header import Flag, Headers, check_headers
from gradsync.policy import Guard
from gradsync.transport.lane import Lane


def step_counts(lane: Lane, guard: Guard, headers: Headers, names: list[str]) -> bool:
    """True if every rank applies the step, False if every rank drops it; or every rank raises."""
    ranks = lane.groups.ranks
    if aborted := headers.flagged(Flag.ABORTED):
        who = listed([ranks[rank] for rank in aborted])
        warnings.warn(
            f"{lane.place()} backward did not finish on {who}: the batch is skipped on every rank", stacklevel=2
        )
        return False
    check_headers(headers, names, ranks)
    bad = [(rank, head.nonfinite) for rank, head in enumerate(headers.heads) if head.nonfinite >= 0]
    if not bad or guard.nonfinite == "allow":
        return True
    rank, parameter = bad[0]
    who = f"rank {ranks[rank]} has NaN or Inf in the gradient of {names[parameter]}"
    if guard.nonfinite == "raise":
        raise NonFinite(f"{lane.place()} {who}; no rank has applied this step")
    warnings.warn(f"{lane.place()} {who}: the step is skipped on every rank", stacklevel=2)
    return False
