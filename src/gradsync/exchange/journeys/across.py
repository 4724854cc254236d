"""Exactly inside each host, compressed across: the first rank of a host speaks for it.

inside, a sum      across, compressed             inside, back to all
ranks of a host    the first ranks of all hosts   ranks of a host
"""

from __future__ import annotations

from gradsync.exchange.desk import Journey
from gradsync.exchange.house import House
from gradsync.exchange.journeys.route import Route
from gradsync.exchange.parcel import Parcel


class Across:
    """Another way to travel, between hosts only."""

    def __init__(self, parcel: Parcel, house: House, inner: Route | None, num_inner_rounds: int) -> None:
        """`inner` is None where another rank speaks for this host."""
        self._parcel, self._house, self._inner = parcel, house, inner
        self._num_inner_rounds = num_inner_rounds
        self.way = "across_hosts"
        self.sent_nbytes = 0.0 if inner is None else inner.sent_nbytes

    def go(self, step: int) -> Journey:
        flat, index = self._parcel.flat, self._parcel.index
        yield self._house.sum(flat, index)
        if self._inner is not None:
            yield from self._inner.go(step)
        else:
            for _ in range(self._num_inner_rounds):
                yield None
            flat.zero_()
        # What the others bring is zero: adding it up hands the first rank's to all.
        yield self._house.sum(flat, index)
