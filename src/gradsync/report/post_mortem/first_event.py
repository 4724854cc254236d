"""The first event in a run, and its place: from errors, health, ends and flight records. Pure.

Whoever raises is seldom to blame: errors that name others are followed to the rank that has no excuse (`failures`),
what a rank raised on its own account is a cause by itself (`failures`), and who said nothing is found by those who
waited for it, or by all having stopped. Without any of these, what the guards found (`health`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gradsync.errors import listed
from gradsync.report.post_mortem.failures import failure
from gradsync.report.post_mortem.health import health_incident
from gradsync.report.post_mortem.incident import Incident, IncidentLocation, absent, upper_first
from gradsync.report.post_mortem.last_seen import LastSeen, last_seen, seconds_ago
from gradsync.trace.reader import RunTrace
from gradsync.units import show_seconds

STALE_S = 60.0  # who was seen after that may well be running
_MOST_NAMED = 64

__all__ = ["Incident", "first_event", "quiet_end"]


def first_event(run: RunTrace, now: float | None = None) -> Incident | None:
    """Return what happened first; None if nothing did: all ended in good order, or the run goes on.

    With `now` (seconds of the wall clock), that nobody has moved for a minute counts too.
    """
    seen = last_seen(run)
    incident = failure(run, seen) or abandoned(run, seen)
    if incident is None and now is not None:
        incident = standstill(run, seen, now)
    return incident or health_incident(run) or (None if now is None else _unknown(run, seen))


def quiet_end(run: RunTrace, now: float) -> str:
    """The end of a run in which nothing happened: whether it is over or goes on, in a sentence."""
    seen = last_seen(run)
    open_ = [rank for rank, each in seen.items() if each.silent]
    if not open_:
        return _good_end(run)
    reached = _latest(each.step for each in seen.values())
    ago = seconds_ago(run, seen, now)
    last = "" if ago is None else f", {show_seconds(max(0.0, ago))} ago"
    return f"The run goes on: {listed(open_)} came to {reached}{last}."


def _unknown(run: RunTrace, seen: Mapping[int, LastSeen]) -> Incident | None:
    """All whose files are here ended in good order, and not all files are here."""
    missing = absent(run)
    if not missing or any(each.silent for each in seen.values()):
        return None
    return IncidentLocation(run, missing[:_MOST_NAMED], None).incident(
        "missing", _good_end(run), f"How {listed(missing[:_MOST_NAMED])} ended nobody can say.", stopped=False
    )


def _good_end(run: RunTrace) -> str:
    finished = _latest(trace.steps[-1].step if trace.steps else None for trace in run.ranks.values())
    if len(run.ranks) == 1:
        return f"{upper_first(listed([*run.ranks]))} ended in good order, after {finished}."
    return f"All {len(run.ranks)} ranks that wrote here ended in good order, after {finished}."


def _latest(steps: Iterable[int | None]) -> str:
    known = [step for step in steps if step is not None]
    return f"step {max(known)}" if known else "no step at all"


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
