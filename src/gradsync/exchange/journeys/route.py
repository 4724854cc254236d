"""What every way to travel has in common."""

from __future__ import annotations

from typing import Protocol

from gradsync.exchange.pipeline import Journey


class Route(Protocol):
    """A bucket's way, whatever is done to it."""

    way: str  # for people: "gather", "two_phase", or the algorithm that adds payloads up
    sent_nbytes: float  # what this rank sends over a network in a step

    def go(self, step: int) -> Journey:
        """The journey of one step; at its end the bucket holds the sum over the ranks."""
