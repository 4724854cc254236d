"""How stale the updates of a shard were: a count per power of two."""

from __future__ import annotations


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
        """Up to the highest class that was met."""
        return {_name(place): count for place, count in enumerate(self._counts)}


def _name(place: int) -> str:
    low, high = 1 << place >> 1, (1 << place) - 1
    return str(low) if low == high else f"{low}_{high}"
