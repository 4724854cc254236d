"""What happened first in a run, and where: from errors, health, ends and flight records. Pure.

Whoever raises is seldom to blame: errors that name others are followed to the rank that has no excuse (`failures`),
what a rank raised on its own account is a cause by itself (`failures`), and who said nothing is found by those who
waited for it (`silence`). Without any of these, what the guards found (`health`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gradsync.errors import listed
from gradsync.report.post_mortem.failures import failure
from gradsync.report.post_mortem.health import health_incident
from gradsync.report.post_mortem.incident import Incident, IncidentLocation, absent, upper_first
from gradsync.report.post_mortem.last_seen import LastSeen, last_seen, seconds_ago
from gradsync.report.post_mortem.silence import abandoned, standstill
from gradsync.trace.reader import RunTrace
from gradsync.units import show_seconds

_MOST_NAMED = 64

__all__ = ["Incident", "first_event", "quiet_end"]


def first_event(run: RunTrace, now: float | None = None) -> Incident | None:
    """What happened first; None if nothing did: all ended in good order, or the run goes on.

    With `now` (seconds of the wall clock), that nobody has moved for a minute counts too.
    """
    seen = last_seen(run)
    incident = failure(run, seen) or abandoned(run, seen)
    if incident is None and now is not None:
        incident = standstill(run, seen, now)
    return incident or health_incident(run) or (None if now is None else _unknown(run, seen))


def quiet_end(run: RunTrace, now: float) -> str:
    """Where nothing happened: whether the run is over or goes on, in a sentence."""
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
