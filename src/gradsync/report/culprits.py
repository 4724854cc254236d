"""Who is to blame among ranks that raised: errors that name others are followed to those whom nobody can excuse. Pure.

rank 2   ✕ killed, says nothing
rank 0     PeerLost: "rank 2"           → rank 2
rank 1     PeerLost: "rank 0"  → rank 0 → rank 2
"""

from __future__ import annotations

from collections.abc import Mapping

from gradsync.trace.lines import Error

_OF_OTHERS = ("PeerLost", "SyncTimeout")
_OF_A_TRANSPORT = ("RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError")


def is_of_others(error: Error) -> bool:
    """Whether it says that somebody else is missing; all other errors are causes by themselves.

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

    In a circle of ranks that miss each other, whoever raised something else than that a peer is missing began it: the
    others left because of it, and were gone when it looked around.

    >>> lost, broke = Error(7, "PeerLost", [1], None, ""), Error(7, "RuntimeError", [0], None, "shapes differ")
    >>> list(causes_in({0: lost, 1: broke})), list(causes_in({1: broke}))
    ([1], [])
    """
    own = {rank: error for rank, error in raised.items() if not is_of_others(error)}
    circle = culprits_of(raised)
    if not own and circle and all(rank in raised for rank in circle):
        return {rank: raised[rank] for rank in circle if raised[rank].what not in _OF_OTHERS}
    return own
