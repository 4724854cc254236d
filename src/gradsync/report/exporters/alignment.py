"""One clock for all ranks: each rank's monotonic clock, moved to rank 0's."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from gradsync.trace.lines import ClockShift, RunHeader
from gradsync.trace.reader import RankTrace, RunTrace


class AlignedClocks:
    """A rank's clock: what to add to it, from step to step."""

    def __init__(self, clocks: Sequence[ClockShift], usual_s: float) -> None:
        self._clocks = sorted(clocks, key=lambda clock: clock.step)
        self._steps = [clock.step for clock in self._clocks]
        self._usual_s = usual_s

    def offset_s(self, step: int) -> float:
        """The offset, between two estimates on a straight line: quartz drifts, it does not jump.

        >>> clock = AlignedClocks([ClockShift(0, 1.0, 0.0), ClockShift(10, 2.0, 0.0)], 0.0)
        >>> [clock.offset_s(step) for step in (0, 5, 10, 99)]
        [1.0, 1.5, 2.0, 2.0]
        """
        if not self._clocks:
            return self._usual_s
        after = bisect_right(self._steps, step)
        if after in (0, len(self._clocks)):
            return self._clocks[max(0, after - 1)].offset_s
        left, right = self._clocks[after - 1], self._clocks[after]
        return left.offset_s + (right.offset_s - left.offset_s) * (step - left.step) / (right.step - left.step)


def align(run: RunTrace) -> dict[int, AlignedClocks]:
    """Every rank's clock; where no estimate was written, hosts are told apart by their wall clocks."""
    first = next(iter(run.ranks.values())).run
    return {rank: AlignedClocks(trace.clocks, _by_wall(trace.run, first)) for rank, trace in run.ranks.items()}


def wall(trace: RankTrace, at: float) -> float:
    """A moment of a rank's own clock as seconds since 1970."""
    return trace.run.started + at - trace.run.clock


def _by_wall(run: RunHeader, first: RunHeader) -> float:
    if run.host == first.host:  # processes of one host share its clock
        return 0.0
    return (run.started - run.clock) - (first.started - first.clock)
