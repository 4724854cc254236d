"""The clocks of all workers, and who may read: the rule of stale-synchronous parallel. Pure.

A worker's clock is the number of its pushes. With max_staleness=2:

    rank 0   ●──●──●──●──●──●  reads at clock 5? 5 − 3 ≤ 2: yes
    rank 1   ●──●──●──●─       the slowest, at 3
    rank 2   ●──●──●──●──●──●──●  at 6? 6 − 3 > 2: waits for rank 1
    rank 3   ●──●  left        counts no more

Note [Bound of staleness]
    The staleness of an update is how many other updates its shard made between the worker's read and the update.
    Let worker m read at clock c. Every other worker j that is not gone has a clock of c − s at least, or m would
    wait. Until m's next push arrives the shard knows m at clock c. To push for the k-th time, j must have read at
    k − 1, here too, so k − 1 − c ≤ s: j's clock is c + s + 1 at most. So between the two j made 2s + 1 updates at
    most, and who left made none: no update is staler than (2s + 1)(n − 1).

        j's clock   c−s ···· c ···· c+s+1      when m reads ├──────────┤ when m's push arrives

    With s = 0 one mean per clock is one update, and all of its gradients were read after the one before: 0.

How stale the updates of a shard were: a count per power of two.
"""

from __future__ import annotations

from collections.abc import Sequence


def staleness_bound(max_staleness: int | None, num_workers: int) -> int | None:
    """The most versions that an update can be behind; see [Bound of staleness]. None: there is no bound.

    >>> staleness_bound(0, 4), staleness_bound(1, 4), staleness_bound(None, 4)
    (0, 9, None)
    """
    if max_staleness is None:
        return None
    return (2 * max_staleness + 1) * (num_workers - 1) if max_staleness else 0


class Clocks:
    """The clocks of the workers: how often each has pushed, and who still does.

    >>> clocks = Clocks(2)
    >>> clocks.advance(0, 1)
    >>> clocks.may_read(1, max_staleness=0), clocks.may_read(1, max_staleness=1)
    (False, True)
    >>> clocks.leave(1)
    >>> clocks.may_read(1, max_staleness=0)
    True
    """

    def __init__(self, num_workers: int) -> None:
        self._now = [0] * num_workers
        self._live = [True] * num_workers

    @property
    def num_live(self) -> int:
        return sum(self._live)

    @property
    def slowest(self) -> int:
        """The lowest clock of those who still push; the highest of all if nobody does."""
        return min((now for now, live in zip(self._now, self._live, strict=True) if live), default=max(self._now))

    def slowest_workers(self) -> list[int]:
        """The workers that hold the others up."""
        return [w for w, now in enumerate(self._now) if self._live[w] and now == self.slowest]

    def distance(self, clock: int) -> int:
        """Return how far a worker at `clock` is ahead of the slowest."""
        return max(0, clock - self.slowest)

    def may_read(self, clock: int, max_staleness: int | None) -> bool:
        return max_staleness is None or self.distance(clock) <= max_staleness

    def advance(self, worker: int, clock: int) -> None:
        """The worker has pushed, for the `clock`-th time."""
        assert clock == self._now[worker] + 1, f"worker {worker} was at {self._now[worker]} and pushed as {clock}"
        self._now[worker] = clock

    def leave(self, worker: int) -> None:
        """The worker pushes no more."""
        self._live[worker] = False

    def level(self, clock: int, live: Sequence[bool]) -> None:
        """All stand at `clock`; these go on from there."""
        self._now = [clock] * len(self._now)
        self._live = list(live)


class Histogram:
    """Counts of whole numbers from 0, in the classes 0, 1, 2–3, 4–7, …

    >>> seen = Histogram()
    >>> for staleness in (0, 0, 3):
    ...     seen.add(staleness)
    >>> seen.mean, seen.highest, seen.counts()
    (1.0, 3, {'0': 2, '1': 0, '2_3': 1})
    """

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._sum = 0
        self.highest = 0

    def add(self, number: int) -> None:
        place = number.bit_length()
        self._counts += [0] * (place + 1 - len(self._counts))
        self._counts[place] += 1
        self._sum += number
        self.highest = max(self.highest, number)

    @property
    def mean(self) -> float:
        return self._sum / max(1, sum(self._counts))

    def counts(self) -> dict[str, int]:
        """The counts by class, up to the highest class that was met."""
        return {_name(place): count for place, count in enumerate(self._counts)}


def _name(place: int) -> str:
    low, high = 1 << place >> 1, (1 << place) - 1
    return str(low) if low == high else f"{low}_{high}"
