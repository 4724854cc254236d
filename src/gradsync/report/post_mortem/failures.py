"""The first cause among the errors that ranks raised, in words. Pure.

Errors that name others are followed to those whom nobody can excuse: they are to blame.

rank 2   ✕ killed, says nothing
rank 0     PeerLost: "rank 2"           → rank 2
rank 1     PeerLost: "rank 0"  → rank 0 → rank 2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from gradsync.errors import listed
from gradsync.report.post_mortem.health import health_incident_behind
from gradsync.report.post_mortem.incident import Incident, IncidentLocation, sentence, upper_first
from gradsync.report.post_mortem.last_seen import LastSeen, describe_bucket, seen_at
from gradsync.trace.lines import Error
from gradsync.trace.reader import RunTrace
from gradsync.units import show_seconds

_OF_OTHERS = ("PeerLost", "SyncTimeout")
_OF_A_TRANSPORT = ("RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError")


def is_of_others(error: Error) -> bool:
    """Return whether an error says that somebody else is missing; all others are causes by themselves.

    A stock process group raises a RuntimeError when a peer is gone; the trace then names whom it misses.
    """
    return error.what in _OF_OTHERS or (error.what in _OF_A_TRANSPORT and bool(error.ranks))


def culprits_of(raised: Mapping[int, Error]) -> list[int]:
    """The ranks that were missed and have no excuse; if all excuse themselves by each other, all of those.

    >>> lost = lambda *ranks: Error(7, "PeerLost", list(ranks), None, "")
    >>> culprits_of({0: lost(2), 1: lost(0)}), culprits_of({0: lost(1), 1: lost(0)})
    ([2], [0, 1])
    """
    guilty, excused = set[int](), set[int]()
    open_ = [rank for error in raised.values() if is_of_others(error) for rank in error.ranks]
    while open_:
        rank = open_.pop()
        if rank in guilty or rank in excused:
            continue
        error = raised.get(rank)
        if error is not None and is_of_others(error) and error.ranks and rank not in error.ranks:
            excused.add(rank)
            open_ += error.ranks
        elif error is None or is_of_others(error):
            guilty.add(rank)
        else:
            excused.add(rank)  # what it raised itself is the cause
    return sorted(guilty) or sorted(rank for rank in excused if is_of_others(raised[rank]))


def causes_in(raised: Mapping[int, Error]) -> dict[int, Error]:
    """Errors that ranks raised on their own account.

    In a cycle of ranks that miss each other, whoever raised something else than that a peer is missing began it: the
    others left because of it, and were gone when it looked around.

    >>> lost, broke = Error(7, "PeerLost", [1], None, ""), Error(7, "RuntimeError", [0], None, "shapes differ")
    >>> list(causes_in({0: lost, 1: broke})), list(causes_in({1: broke}))
    ([1], [])
    """
    own = {rank: error for rank, error in raised.items() if not is_of_others(error)}
    cycle = culprits_of(raised)
    if not own and cycle and all(rank in raised for rank in cycle):
        return {rank: raised[rank] for rank in cycle if raised[rank].what not in _OF_OTHERS}
    return own


_KINDS = {"NonFinite": "nonfinite", "Disagreement": "disagreement"}

ErrorByRank = Mapping[int, Error]
SeenByRank = Mapping[int, LastSeen]


def failure(run: RunTrace, seen: SeenByRank) -> Incident | None:
    """The incident that is the first failure; None if no rank raised."""
    raised = {rank: each.error for rank, each in seen.items() if each.error is not None}
    if not raised:
        return None
    own, named = causes_in(raised), culprits_of(raised)
    gone = [rank for rank in named if rank not in raised]
    if own and (not gone or _first_own(seen, own) <= min(_missed(seen, raised, rank) for rank in gone)):
        return _own_error(run, seen, own)
    if not named:
        return _nobody_missing(run, seen, raised)
    if not gone and all(raised[rank].what != "SyncTimeout" for rank in named):
        return _broken_connections(run, seen, raised, named)
    return _missing(run, seen, raised, named)


# When


def _when(seen: SeenByRank, raised: ErrorByRank, rank: int) -> tuple[int, float, int]:
    at = seen[rank].failed_at
    return raised[rank].step, inf if at is None else at, rank


def _first_own(seen: SeenByRank, own: ErrorByRank) -> tuple[int, float]:
    return min(_when(seen, own, rank) for rank in own)[:2]


def _missed(seen: SeenByRank, raised: ErrorByRank, rank: int) -> tuple[int, float]:
    """The step in which the others missed it, and when it was last seen."""
    naming = [error for error in raised.values() if rank in error.ranks]
    at = seen[rank].at if rank in seen else None
    return min(error.step for error in naming), -inf if at is None else at


# What


def _own_error(run: RunTrace, seen: SeenByRank, own: ErrorByRank) -> Incident:
    """The incident of a rank's own error: NaN, a disagreement, or any exception."""
    rank = min(own, key=lambda rank: _when(seen, own, rank))
    error = own[rank]
    if (found := health_incident_behind(run, error)) is not None:
        return found
    alike = sorted(each for each, other in own.items() if (other.what, other.step) == (error.what, error.step))
    who = seen[rank].name if len(alike) == 1 else upper_first(listed(alike))
    told = f"{who} raised {error.what} in step {error.step}{_bucket(run, rank, error)}: {sentence(error.text)}"
    followed = _followers(seen, set(alike), seen[rank].failed_at)
    kind = _KINDS.get(error.what, "raised")
    if kind == "disagreement" and _somebody_left(seen, error.step):
        kind = "left"
    return IncidentLocation(run, error.ranks or alike, error.step, error.bucket).incident(
        kind, upper_first(told), *followed
    )


def _somebody_left(seen: SeenByRank, step: int) -> bool:
    """Return whether a rank had ended in good order by then: with fewer batches than the others, as a rule."""
    return any(each.ended is not None and each.error is None and (each.step or 0) <= step for each in seen.values())


def _missing(run: RunTrace, seen: SeenByRank, raised: ErrorByRank, named: Sequence[int]) -> Incident:
    """The incident of a rank that was killed, vanished, left, or was late."""
    rank = min(named, key=lambda rank: (*_missed(seen, raised, rank), rank))
    accusers = sorted((each for each in raised if each != rank), key=lambda each: _when(seen, raised, each))
    naming = [each for each in accusers if rank in raised[each].ranks]
    told = raised[(naming or accusers or [rank])[0]]
    culprit = (
        _when_given_up(run, seen, (naming or accusers)[:1], rank) if told.what == "SyncTimeout" else seen.get(rank)
    )
    kind, how = _how_it_ended(culprit, told)
    others = [each for each in named if each != rank]
    sentences = [
        f"{upper_first(_name(seen, rank))} {how} in step {_step(culprit, told)}{_doing(culprit)}.",
        *([f"The same is said of {listed(others)}."] if others else []),
        *_accusation(run, seen, raised, naming or accusers, rank, culprit),
        *_followers(seen, {rank, *(naming or accusers)[:1]}, None),
    ]
    bucket = told.bucket if culprit is None or culprit.bucket is None else culprit.bucket
    return IncidentLocation(run, [rank, *others], _step(culprit, told), bucket).incident(kind, *sentences)


def _broken_connections(run: RunTrace, seen: SeenByRank, raised: ErrorByRank, named: Sequence[int]) -> Incident:
    """The incident where each blames another, and all lived to say so: what failed is between them."""
    step = min(raised[rank].step for rank in named)
    hosts = sorted({seen[rank].host for rank in named})
    where = f"the network between hosts {' and '.join(hosts)}" if len(hosts) > 1 else f"host {hosts[0]}"
    text = f"{upper_first(listed(named))} lost each other in step {step}, and lived to say so: look at {where}."
    return IncidentLocation(run, named, step).incident("network", text)


def _nobody_missing(run: RunTrace, seen: SeenByRank, raised: ErrorByRank) -> Incident:
    rank = min(raised, key=lambda rank: _when(seen, raised, rank))
    error = raised[rank]
    text = (
        f"{upper_first(seen[rank].name)} raised {error.what} in step {error.step}{_bucket(run, rank, error)}, and "
        f"names no rank: {sentence(error.text)}"
    )
    return IncidentLocation(run, [], error.step, error.bucket).incident(
        "network", text, *_followers(seen, {rank}, None)
    )


def _when_given_up(run: RunTrace, seen: SeenByRank, accuser: Sequence[int], rank: int) -> LastSeen | None:
    """A rank that was only late goes on, and comes when nobody waits any more: what counts is what it did before."""
    until = seen[accuser[0]].failed_at if accuser else None
    return seen.get(rank) if until is None or rank not in seen else seen_at(run, rank, until)


# In words


def _how_it_ended(culprit: LastSeen | None, told: Error) -> tuple[str, str]:
    if culprit is not None and culprit.ended is not None and culprit.error is None:
        return "left", "detached" if culprit.ended == "detach" else "ended by itself"
    if told.what == "SyncTimeout":
        return "hang", "did not arrive"
    if "no sign of life" in told.text:
        return "vanished", "fell silent"
    return "killed", "ended without a word"


def _name(seen: SeenByRank, rank: int) -> str:
    return seen[rank].name if rank in seen else f"rank {rank}"


def _step(culprit: LastSeen | None, told: Error) -> int:
    return told.step if culprit is None or culprit.step is None else culprit.step


def _doing(culprit: LastSeen | None) -> str:
    return "" if culprit is None else f" while {culprit.doing}"


def _bucket(run: RunTrace, rank: int, error: Error) -> str:
    return "" if error.bucket is None else f" in {describe_bucket(run.ranks[rank], error.step, error.bucket)}"


def _accusation(
    run: RunTrace, seen: SeenByRank, raised: ErrorByRank, accusers: Sequence[int], rank: int, culprit: LastSeen | None
) -> list[str]:
    """Say who noticed first, how much later, and where that was."""
    if not accusers:
        return [f"It says itself: {sentence(raised[rank].text)}"]
    first, told = seen[accusers[0]], raised[accusers[0]]
    since = None if culprit is None else culprit.at
    gap = -1.0 if since is None or first.failed_at is None else first.failed_at - since
    later = f"{show_seconds(gap)} after it was last seen," if gap >= 0 else "Then"
    naming = " naming it" if rank in told.ranks else ""
    where = _bucket(run, first.rank, told) or f", while {first.doing}"
    return [f"{later} rank {first.rank} (host {first.host}) raised {told.what}{naming}{where}."]


def _followers(seen: SeenByRank, told: set[int], since: float | None) -> list[str]:
    """A sentence on the ranks that raised as a consequence."""
    ranks = sorted(rank for rank, each in seen.items() if each.error is not None and rank not in told)
    if not ranks:
        return []
    kinds = sorted({error.what for rank in ranks if (error := seen[rank].error) is not None})
    times = [at for rank in ranks if (at := seen[rank].failed_at) is not None]
    gap = min(times) - since if times and since is not None else -1.0
    later = f" {show_seconds(gap)} later" if gap >= 0 else ""
    return [f"{upper_first(listed(ranks))} followed{later} ({', '.join(kinds)})."]
