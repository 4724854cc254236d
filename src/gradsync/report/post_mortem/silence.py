"""Runs that stopped and nobody raised: some ranks ended early without a word, or nobody moves any more. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradsync.errors import listed
from gradsync.report.post_mortem.incident import Incident, IncidentLocation, upper_first
from gradsync.report.post_mortem.last_seen import LastSeen, seconds_ago
from gradsync.trace.reader import RunTrace
from gradsync.units import show_seconds

STALE_S = 60.0  # who was seen after that may well be running


def abandoned(run: RunTrace, seen: Mapping[int, LastSeen]) -> Incident | None:
    """Some ranks left in good order, in a later step than others were last seen in: those were killed."""
    left = [each for each in seen.values() if each.ended is not None]
    reached = max((each.step for each in left if each.step is not None), default=0)
    gone = [each for each in seen.values() if each.silent and each.step is not None and each.step < reached]
    if not gone:
        return None
    first = _earliest(gone)
    return IncidentLocation(run, [each.rank for each in gone], first.step, first.bucket).incident(
        "killed",
        f"{upper_first(first.name)} ended without a word in step {first.step} while {first.doing}.",
        f"{upper_first(listed([each.rank for each in left]))} went on to step {reached} and ended in good order.",
    )


def standstill(run: RunTrace, seen: Mapping[int, LastSeen], now: float) -> Incident | None:
    """Nobody has moved for a while: who does not wait for others is the one that they wait for."""
    silent = [each for each in seen.values() if each.silent]
    ago = seconds_ago(run, seen, now)
    if not silent or ago is None or ago < STALE_S:
        return None
    furthest = max((each.step for each in silent if each.step is not None), default=None)
    busy = [each for each in silent if not each.waits or each.step != furthest]
    suspects = busy if 0 < len(busy) < len(silent) else silent
    first = _earliest(suspects)
    place = IncidentLocation(run, [each.rank for each in suspects], first.step, first.bucket)
    head = f"No rank has moved for {show_seconds(ago)}, and none has said why."
    where = "before its first step" if first.step is None else f"in step {first.step}"
    seen_last = f"{upper_first(first.name)} was seen last {where}, while {first.doing}"
    if suspects is silent:
        together = "" if len(silent) == 1 else f"; {listed(_others(silent, first))} stopped likewise"
        return place.incident("stopped", head, f"{seen_last}{together}.")
    waited = listed([each.rank for each in silent if each not in suspects])
    return place.incident("stopped", head, f"{seen_last}; {waited} waited.")


def _earliest(some: Sequence[LastSeen]) -> LastSeen:
    return min(some, key=lambda each: (each.at is None, each.at or 0.0, each.rank))


def _others(some: Sequence[LastSeen], one: LastSeen) -> list[int]:
    return [each.rank for each in some if each is not one]
