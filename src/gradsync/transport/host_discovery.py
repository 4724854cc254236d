"""The rounds through a store in which a rank finds out who shares its host, and who does not come; a generator.

    block   set record ─ see the block's ─┐           ┌─ see the records of mates of other blocks ─ set whom I miss ─┐
    all                                   └ host map ─┘                                      hosts that are broken ──┘

In a group of one block everybody has every record then, and nothing is published. In a larger one each rank reads what
its own block and its own host say, and two values for all: see `store_tree`.

The generator yields whenever it has to wait, and raises when nobody needs to wait any more. It asks the store, a clock
and a `Sight`; so a simulation drives the very code that real ranks run.

Note [Word of a death]
    A rank sees the deaths of its own host and block only. In a group of several blocks it leaves word for all when it
    gives up because of one, and who waits for other blocks reads it: `FAULT` holds the ranks that were lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from gradsync.errors import PeerLost, SyncTimeout, listed, place
from gradsync.transport import host_map
from gradsync.transport.host_map import HostMap
from gradsync.transport.store_tree import BLOCK, Awaited, KeyStore, StoreTree

RECORDS, SIGHTS, BEATS, FAULT = "record", "view", "beat", "fault"
HOST_NBYTES = 32  # a record begins with so many bytes, which are equal on one host
_LOOK_S, _RANKS_PER_LOOK_S = 1.0, 1024  # between two looks at other blocks: the store is asked so often by all


class Bound(Protocol):
    """The time to wait, as time awake; an `AwakeClock`, or a simulation's."""

    seconds: float

    def look(self) -> float:
        """Seconds so far."""


class Sight(Protocol):
    """The view between ranks: what one shows of itself and sees of others, by index in the group."""

    def state(self) -> bytes:
        """Return what it says of itself, for those out of view."""

    def record(self) -> bytes:
        """Return what it is found by; the first bytes say its host."""

    def look(self, records: dict[int, bytes]) -> tuple[set[int], list[int]]:
        """Return who of these ranks of its host is in view from here on, and whose process has ended."""

    def have_ended(self, ranks: Sequence[int]) -> list[int]:
        """Return those whose process is known to have ended though they did not come."""

    def hear(self, ranks: Sequence[int]) -> None:
        """Listen to these, which are out of view, and be heard: from here on, by the store."""


class HostDiscovery:
    """One rank's part; `hosts` is known when `steps` has come to its end."""

    def __init__(
        self, store: KeyStore, rank: int, ranks: Sequence[int], sight: Sight, bound: Bound, block: int = BLOCK
    ) -> None:
        """`rank` by index in `ranks`, which are global."""
        self.map: HostMap | None = None
        self.absent: list[int] = []  # who has not come yet
        self.all_came = False
        self.tree = StoreTree(store, rank, len(ranks), block)
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._sight = sight
        self._bound = bound
        self._in_view: set[int] = {rank}
        self._heard: set[int] = set()
        self._looked_at = 0.0

    def steps(self) -> Iterator[Awaited]:
        """Find everybody; yields whenever there is somebody to wait for."""
        for awaited in self._find():
            self._look_out(awaited)
            yield awaited

    def tell_lost(self, ranks: Sequence[int]) -> bool:
        """Leave word for all that these are lost; False where everybody sees it by itself."""
        if self.tree.one_block or not ranks:
            return False
        self._store.set(FAULT, host_map.said(sorted(set(ranks))))
        self._store.add(f"{FAULT}/told", 1)
        return True

    def all_know(self, lost: Sequence[int]) -> bool:
        """Return whether every other rank has left word of these too: then none needs to read it any more."""
        return self._store.add(f"{FAULT}/told", 0) >= len(self._ranks) - len(set(lost))

    def _find(self) -> Iterator[Awaited]:
        yield from self._take_records()
        yield from self._compare_sights()

    def _take_records(self) -> Iterator[Awaited]:
        """Everybody of the block, then who is on which host, then the mates of other blocks."""
        tree, mine = self.tree, self._sight.record()
        # Before the record: who has seen that reads the other, and must not wait for it.
        self._store.set(f"{BEATS}/{self._rank}", self._sight.state())
        hosts = {self._rank: mine[:HOST_NBYTES]}

        def see(records: dict[int, bytes]) -> None:
            hosts.update({rank: record[:HOST_NBYTES] for rank, record in records.items()})
            mates = {rank: record for rank, record in records.items() if hosts[rank] == hosts[self._rank]}
            seen, gone = self._sight.look(mates) if mates else (set(), [])
            self._in_view |= seen
            if gone:  # all whose records are there: who noticed the first has ended too by the time another comes
                raise self._ended(gone)

        yield from tree.take(RECORDS, tree.block, mine, see)
        self._hear(tree.block.members)
        if tree.one_block:
            found = host_map.together(hosts)
        else:
            size = len(self._ranks)
            said = yield from tree.merge(
                RECORDS,
                host_map.summary(hosts),
                lambda summaries: host_map.joined(summaries, size),
                lambda summary: host_map.published(summary, size),
            )
            found = host_map.read_map(said, size)
            see((yield from tree.values_of(RECORDS, [rank for rank in found.mates(self._rank) if rank not in hosts])))
            if len(found.hosts) > 1:
                self._hear_beyond()
        self.map, self.absent, self.all_came = found, [], True

    def _compare_sights(self) -> Iterator[Awaited]:
        """Sight may be one-sided: such hosts are none, and who is out of view for anybody must write to the store.

        This also keeps every page open until everybody has looked.
        """
        assert self.map is not None
        tree, found, size = self.tree, self.map, len(self._ranks)
        missed = {self._rank: [rank for rank in found.mates(self._rank) if rank not in self._in_view]}

        def see(rows: dict[int, bytes]) -> None:
            missed.update({rank: host_map.numbers(row, size) for rank, row in rows.items()})

        yield from tree.take(SIGHTS, tree.block, host_map.said(missed[self._rank]), see)
        broken = sorted({found.number[rank] for rank, others in missed.items() if others})
        if not tree.one_block:
            said = yield from tree.merge(SIGHTS, host_map.said(broken), lambda parts: host_map.united(parts, size))
            broken = host_map.numbers(said, size)
        if broken and found.number[self._rank] in broken:
            self._sight.hear([])
        self.map = found.without(broken)

    # Who is listened to through the store, until the ranks are connected

    def _hear(self, ranks: Iterable[int]) -> None:
        unheard = [rank for rank in ranks if rank not in self._in_view and rank not in self._heard]
        if unheard:
            self._heard.update(unheard)
            self._sight.hear(unheard)

    def _hear_beyond(self) -> None:
        """First ranks hear each other, so that a block that dies as a whole is missed; all hear who keeps the store."""
        keeper = [self._ranks.index(0)] if 0 in self._ranks else []
        self._hear(rank for members in [*(c.members for c in self.tree.subgroups[1:]), keeper] for rank in members)
        if not self._heard:
            self._sight.hear([])

    # Who is late, and who is lost

    def _look_out(self, awaited: Awaited) -> None:
        """Raise when nobody needs to wait any more."""
        waited, ranks = self._bound.look(), awaited.ranks
        over = waited >= self._bound.seconds
        came = awaited.kind != RECORDS
        if not came and ranks:
            self.absent = ranks
        if not self.tree.one_block:
            every = max(_LOOK_S, len(self._ranks) / _RANKS_PER_LOOK_S)
            if over or waited - self._looked_at >= every:
                self._looked_at = waited
                self._hear_of_death()
                ranks, came = self._look_at_others(awaited)
        if ended := self._sight.have_ended(ranks):
            raise self._ended(ended)
        if over:
            raise self._out_of_patience(ranks, came)

    def _look_at_others(self, awaited: Awaited) -> tuple[list[int], bool]:
        """Return who keeps all others waiting, and whether they have come at least."""
        missing, holding, left = self.tree.laggards(awaited.kind)
        came = awaited.kind != RECORDS or not missing
        if awaited.kind == RECORDS:
            self.absent = missing
        return missing or holding or awaited.ranks or left or [0], came

    def _hear_of_death(self) -> None:
        """Raise if somebody has left word: see [Word of a death]."""
        if not self._store.check([FAULT]):
            return
        lost = host_map.numbers(bytes(self._store.multi_get([FAULT])[0]), len(self._ranks))
        lost = [rank for rank in lost if rank != self._rank]
        if lost:
            ranks = [self._ranks[rank] for rank in lost]
            whose = "its own output" if len(ranks) == 1 else "their own output"
            raise PeerLost(
                f"{self._place()} {listed(ranks)} died or fell silent before all had met in attach, as a rank beside "
                f"it says; see {whose} for why, and let the launcher restart all ranks",
                ranks,
            )

    def _ended(self, lost: Sequence[int]) -> PeerLost:
        """The error if these processes are known to have ended."""
        ranks = [self._ranks[rank] for rank in lost]
        processes, own = ("process", "its own") if len(ranks) == 1 else ("processes", "their own")
        return PeerLost(
            f"{self._place()} the {processes} of {listed(ranks)} ended before all had met in attach; see {own} output "
            "for why, and let the launcher restart all ranks",
            ranks,
        )

    def _out_of_patience(self, late: Sequence[int], came: bool) -> SyncTimeout:
        ranks = [self._ranks[rank] for rank in late]
        what = "did not come; every rank of the group must call it, equally often and in the same order"
        if came:
            what = "came and went no further; look at what holds them up"
        return SyncTimeout(
            f"{self._place()} waited {self._bound.seconds:g} s in attach, but {listed(ranks)} {what}", ranks
        )

    def _place(self) -> str:
        return place(self._ranks[self._rank], len(self._ranks))
