"""Where the answers of all owners to one question meet."""

from __future__ import annotations

import threading

from gradsync.pace.async_sgd.owner import Read


class Inbox:
    """The training thread asks and waits here; the owners' answers are put in, on any thread."""

    def __init__(self, num_owners: int) -> None:
        self._size = num_owners
        self._reads: dict[int, Read] = {}
        self._arrived = threading.Condition()

    def empty(self) -> None:
        """Before a question is asked."""
        with self._arrived:
            self._reads.clear()

    def put(self, owner: int, read: Read) -> None:
        with self._arrived:
            self._reads[owner] = read
            self._arrived.notify_all()

    def full(self, slice_s: float) -> bool:
        """Whether every owner has answered; waits for at most a slice."""
        with self._arrived:
            return self._arrived.wait_for(lambda: len(self._reads) == self._size, slice_s)

    def missing(self) -> list[int]:
        """The owners that have not answered."""
        with self._arrived:
            return [owner for owner in range(self._size) if owner not in self._reads]

    def reads(self) -> list[Read]:
        """All answers, by owner."""
        with self._arrived:
            return [self._reads[owner] for owner in range(self._size)]
