"""Exactly inside each host, compressed across: the first rank of a host speaks for it.

inside, a sum      across, compressed             inside, back to all
ranks of a host    the first ranks of all hosts   ranks of a host
"""

from __future__ import annotations

from gradsync.exchange.flat import FlatBucket
from gradsync.exchange.journeys.route import Route
from gradsync.exchange.participants import WithinHosts
from gradsync.exchange.pipeline import Journey


class Across:
    """Another way to travel, between hosts only."""

    def __init__(
        self, flat_bucket: FlatBucket, within_hosts: WithinHosts, inner: Route | None, num_inner_rounds: int
    ) -> None:
        """`inner` is None where another rank speaks for this host."""
        self._flat_bucket, self._within_hosts, self._inner = flat_bucket, within_hosts, inner
        self._num_inner_rounds = num_inner_rounds
        self.way = "across_hosts"
        self.sent_nbytes = 0.0 if inner is None else inner.sent_nbytes

    def go(self, step: int) -> Journey:
        flat, index = self._flat_bucket.flat, self._flat_bucket.index
        yield self._within_hosts.sum(flat, index)
        if self._inner is not None:
            yield from self._inner.go(step)
        else:
            for _ in range(self._num_inner_rounds):
                yield None
            flat.zero_()
        # What the others bring is zero: adding it up hands the first rank's to all.
        yield self._within_hosts.sum(flat, index)
