"""The findings of guards in gradients, replicas and orders, as an incident: the first, or the one behind an error."""

from __future__ import annotations

from collections.abc import Iterable

from gradsync.errors import listed
from gradsync.report.post_mortem.incident import Incident, IncidentLocation, sentence, upper_first
from gradsync.trace.lines import Error, Health
from gradsync.trace.reader import RunTrace

_KINDS = {"nonfinite": "nonfinite", "skips": "nonfinite", "drift": "drift", "repair": "drift"} | {
    "order": "order",
    "loss_scale": "loss_scale",
    "replaced": "replaced",
}
_HAD = {
    "nonfinite": "had NaN or Inf in the gradient of",
    "drift": "differed from the other replicas in",
    "order": "came in another order to",
    "loss_scale": "had another loss scale at",
    "replaced": "replaced",
}
_MOST_NAMED = 64
_BEHIND = {"NonFinite": ("nonfinite", "skips"), "Disagreement": ("drift", "order", "loss_scale")}


def health_incident(run: RunTrace) -> Incident | None:
    """The first finding of a run that went on in spite of it."""
    found = _first(line for line in _lines(run) if line.what in _KINDS)
    if found is None:
        return None
    times = len({line.step for line in _lines(run) if line.what == found.what})
    went_on = "The run went on." if times == 1 else f"That was found in {times} steps; the run went on."
    return _incident(run, found, went_on, stopped=False)


def health_incident_behind(run: RunTrace, error: Error) -> Incident | None:
    """Return what a guard had found when it raised this; None if the error is of another kind."""
    kinds = _BEHIND.get(error.what, ())
    lines = [line for line in _lines(run) if line.what in kinds and line.step <= error.step]
    # Skipped steps in a row lead to the error; a difference raises in the step in which it is found, or never.
    found = _first(line for line in lines if error.what == "NonFinite" or line.step == error.step)
    if found is None:
        return None
    return _incident(run, found, f"By that the ranks stopped in step {error.step} ({error.what}).", stopped=True)


def _lines(run: RunTrace) -> list[Health]:
    return [line for trace in run.ranks.values() for line in trace.health]


def _first(lines: Iterable[Health]) -> Health | None:
    """The line of the first step that says most: every rank writes one down."""
    return min(lines, key=lambda line: (line.step, line.parameter is None, not line.ranks), default=None)


def _incident(run: RunTrace, found: Health, then: str, stopped: bool) -> Incident:
    kind = _KINDS[found.what]
    ranks = [rank for rank in found.ranks if rank in run.members][:_MOST_NAMED]
    said = sentence(found.text)
    if ranks and found.parameter is not None:
        said = f"{upper_first(listed(ranks))} {_HAD[kind]} {found.parameter} in step {found.step}: {said}"
    else:
        said = f"In step {found.step}: {said}"
    return IncidentLocation(run, ranks, found.step).incident(
        kind, said, then, parameter=found.parameter, stopped=stopped
    )
