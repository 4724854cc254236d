"""Many ranks that discover their hosts in one process, turn by turn, over a store that counts what it is asked.

What a rank writes in a turn is there for others in the next one: a turn is what takes a round trip in a cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from typing import Any

from gradsync.transport.host_discovery import HOST_NBYTES, HostDiscovery
from gradsync.transport.store_tree import BLOCK


class SimulatedStore:
    """What all ranks have written before this turn."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.numbers: dict[str, int] = {}
        self._later: list[Callable[[], object]] = []

    def turn(self) -> None:
        """Let everybody see what was written."""
        for write in self._later:
            write()
        self._later.clear()

    def later(self, write: Callable[[], object]) -> None:
        self._later.append(write)


class StoreClient:
    """One rank's connection; counts its requests and the bytes that it sent and got."""

    def __init__(self, store: SimulatedStore) -> None:
        self.num_requests = 0
        self.nbytes = 0
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self._count(key, value)
        self._store.later(lambda: self._store.values.update({key: bytes(value)}))

    def check(self, keys: list[str]) -> bool:
        self._count(*keys)
        return all(key in self._store.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = [self._store.values[key] for key in keys]  # a real one would wait for those that are not there
        self._count(*keys, *values)
        return values

    def add(self, key: str, amount: int) -> int:
        self._count(key)
        numbers = self._store.numbers
        if amount:
            self._store.later(lambda: numbers.update({key: numbers.get(key, 0) + amount}))
        return numbers.get(key, 0) + amount

    def _count(self, *parts: str | bytes) -> None:
        self.num_requests += 1
        self.nbytes += sum(map(len, parts))


class SimulatedClock:
    """A bound in simulated seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.now = 0.0

    def look(self) -> float:
        return self.now


class SimulatedSight:
    """What a rank shows and sees, made up: it sees all of its host but those it is `blind` for."""

    def __init__(self, host: str, blind: Iterable[int] = ()) -> None:
        self.heard: list[list[int]] = []
        self.ended: set[int] = set()
        self._record = sha256(host.encode()).digest() + bytes(72)
        self._blind = set(blind)
        assert len(self._record) > HOST_NBYTES

    def state(self) -> bytes:
        return bytes(64)

    def record(self) -> bytes:
        return self._record

    def look(self, records: dict[int, bytes]) -> tuple[set[int], list[int]]:
        return {rank for rank in records if rank not in self._blind}, []

    def have_ended(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if rank in self.ended]

    def hear(self, ranks: Sequence[int]) -> None:
        self.heard.append(list(ranks))


class SimulatedMeeting:
    """All ranks, on the hosts of these names; `absent` ones never come, others may be stopped in between."""

    def __init__(
        self,
        hosts: Sequence[str],
        blind: Iterable[tuple[int, int]] = (),
        absent: Iterable[int] = (),
        block: int = BLOCK,
        patience: float = 60.0,
    ) -> None:
        """`blind`: pairs of who does not see whom."""
        self.rounds = 0
        self.clock = SimulatedClock(patience)
        self.errors: dict[int, Exception] = {}
        self.ended: set[int] = set()
        self._store = SimulatedStore()
        ranks, missed = range(len(hosts)), dict[int, set[int]]()
        for who, whom in blind:
            missed.setdefault(who, set()).add(whom)
        present = [rank for rank in ranks if rank not in set(absent)]
        self.clients = {rank: StoreClient(self._store) for rank in present}
        self.sights = {rank: SimulatedSight(hosts[rank], missed.get(rank, ())) for rank in present}
        self.found = {
            rank: HostDiscovery(self.clients[rank], rank, ranks, self.sights[rank], self.clock, block)
            for rank in present
        }
        self._steps: dict[int, Iterator[Any]] = {rank: found.steps() for rank, found in self.found.items()}

    @property
    def waiting(self) -> list[int]:
        """Who is not at its end."""
        return list(self._steps)

    def turn(self, seconds: float = 0.0) -> None:
        """Let every rank go on until it has to wait."""
        self.rounds += 1
        self.clock.now += seconds
        for rank, steps in list(self._steps.items()):
            try:
                next(steps)
            except StopIteration:
                del self._steps[rank]
            except Exception as error:
                self.errors[rank] = error
                del self._steps[rank]
        self._store.turn()

    def lose(self, rank: int) -> None:
        """Have a rank do no more."""
        self._steps.pop(rank, None)

    def tell_lost(self, rank: int, lost: Sequence[int]) -> None:
        """Have a rank give up because of others, and leave word."""
        self.lose(rank)
        self.found[rank].tell_lost(lost)

    def run(self, most: int = 100, seconds: float = 0.0) -> SimulatedMeeting:
        """Until nobody waits any more."""
        while self._steps:
            assert self.rounds < most, f"{self.waiting[:8]} still wait after {most} rounds"
            self.turn(seconds)
        return self

    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """What all have found; fails where they disagree."""
        maps = {found.map.hosts for found in self.found.values() if found.map is not None}
        assert len(maps) == 1
        return maps.pop()

    def requests(self) -> Counter[int]:
        """How often each rank asked the store."""
        return Counter({rank: client.num_requests for rank, client in self.clients.items()})
