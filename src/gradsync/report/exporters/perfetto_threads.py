"""Threads of a picture: slices in order, none across another's edge, however odd the times in a trace are.

lane 0   ├── bucket 0 ──┤   ├─ bucket 2 ─┤
lane 1        ├── bucket 1 ──┤
"""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[int, int]  # microseconds


class ThreadTrack:
    """One thread: what comes later starts later."""

    def __init__(self) -> None:
        self._end = 0

    def place(self, span: Span) -> Span | None:
        """The span as far as the thread is still free; None if nothing is left of it.

        >>> lane = ThreadTrack()
        >>> lane.place((0, 10)), lane.place((9, 12)), lane.place((3, 11))
        ((0, 10), (10, 12), None)
        """
        start, stop = max(span[0], self._end), span[1]
        if stop < start or (stop == start and span[1] > span[0]):
            return None
        self._end = stop
        return start, stop


class Lanes:
    """A set of threads, as many as there are slices at once."""

    def __init__(self, most: int) -> None:
        self._ends: list[int] = []
        self._most = most

    def place(self, span: Span) -> int | None:
        """The first thread that is free by then; None if there are too many at once.

        >>> lanes = Lanes(2)
        >>> [lanes.place(span) for span in ((0, 10), (5, 20), (12, 15), (13, 14))]
        [0, 1, 0, None]
        """
        for lane, end in enumerate(self._ends):
            if end <= span[0]:
                self._ends[lane] = span[1]
                return lane
        if len(self._ends) == self._most:
            return None
        self._ends.append(span[1])
        return len(self._ends) - 1


def inside(parent: Span, spans: Iterable[Span]) -> list[Span | None]:
    """Each span cut to the parent and to what the ones before it left free.

    >>> inside((0, 10), [(-1, 4), (3, 6), (8, 12), (12, 13)])
    [(0, 4), (4, 6), (8, 10), None]
    """
    lane, cut = ThreadTrack(), []
    lane.place((parent[0], parent[0]))
    for start, stop in spans:
        within = min(max(start, parent[0]), parent[1]), min(stop, parent[1])
        cut.append(lane.place(within) if within[1] > within[0] else None)
    return cut
