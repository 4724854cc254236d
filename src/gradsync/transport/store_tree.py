"""Messages between many ranks through one store, though each asks it for little: by blocks of ranks.

    level 1    0 ──────── 64 ──────── 128 ── …      first ranks of blocks: what each says for its own goes up
    level 0    0 1 … 63   64 65 … 127     …         blocks: who is there sees the others' values

The first rank of all publishes what came of it in one value, which everybody reads. So a rank asks for what its own
subgroups say, 64 ranks at most to each, and for one value more, whatever the number of ranks; and the way up is as long
as its logarithm. A group of 64 ranks or fewer is one block, and nobody needs to publish anything.

Nothing here waits: what has to wait yields whom it `Awaited`, and is asked to go on later, by a thread that sleeps in
between or by a simulation.

Note [Presence]
    Who has come in a subgroup is one number in the store, to which each member adds a bit of its own after its value is
    there. To read it (by adding nothing) takes one request and waits for nobody; so everybody can find out who is
    missing in any block without asking for each rank, and even if the first rank of that block never came. Who gives
    up takes its bit back, so that a later attempt waits for it again; that it was here stands in a second number, else
    the last to give up would miss all others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, Protocol

BLOCK = 64  # ranks in a subgroup: a number in the store has so many bits
_MOST_LOOKS = 64  # at subgroups that have not reported, in one search for who is missing


class KeyStore(Protocol):
    """The requests that a store must answer; `torch.distributed.Store` is one."""

    def set(self, key: str, value: Any) -> None: ...

    def check(self, keys: list[str]) -> bool: ...

    def multi_get(self, keys: list[str]) -> list[bytes]: ...

    def add(self, key: str, amount: int) -> int: ...


class Awaited(NamedTuple):
    """The ranks that keep a rank from going on, and what it waits for."""

    kind: str
    ranks: list[int]  # who has not said it; empty: nobody of this rank's own subgroups


class Laggards(NamedTuple):
    """The ranks that keep all others waiting."""

    missing: list[int]  # did not say it
    holding: list[int]  # first ranks of subgroups that have heard it of all, and not passed it on
    left: list[int]  # took it back: they gave up waiting for the others


class StoreSubgroup(NamedTuple):
    """Ranks that hear each other; the first one speaks for all that are below them."""

    level: int
    members: range

    @property
    def leader(self) -> int:
        return self.members[0]


class StoreTree:
    """One rank's part; all ranks make it with the same `size` and `block`.

    >>> from torch._C._distributed_c10d import HashStore
    >>> StoreTree(HashStore(), rank=2, size=5, block=2).subgroups
    [StoreSubgroup(level=0, members=range(2, 4)), StoreSubgroup(level=1, members=range(0, 4, 2))]
    """

    def __init__(self, store: KeyStore, rank: int, size: int, block: int = BLOCK) -> None:
        if not 2 <= block <= BLOCK:
            raise ValueError(f"a block has 2 to {BLOCK} ranks, got {block}")
        self.store = store
        self.rank = rank
        self.size = size
        # Not longer than needed: of 65 ranks none is alone in the last block.
        self._spans = [(1, -(-size // -(-size // block)))]
        while (span := self._spans[-1][0] * self._spans[-1][1]) < size:
            self._spans.append((span, block))
        self.subgroups = [self._subgroup(0, rank)]
        while self.subgroups[-1].leader == rank and len(self.subgroups) < len(self._spans):
            self.subgroups.append(self._subgroup(len(self.subgroups), rank))
        self._told: list[tuple[str, StoreSubgroup]] = []

    @property
    def block(self) -> StoreSubgroup:
        """The subgroup of ranks that hear this rank itself."""
        return self.subgroups[0]

    @property
    def block_number(self) -> int:
        """The number of this rank's block, in the order of ranks."""
        return self.rank // self._spans[0][1]

    @property
    def one_block(self) -> bool:
        """True if everybody hears everybody."""
        return len(self._spans) == 1

    def tell(self, kind: str, subgroup: StoreSubgroup, value: bytes) -> int:
        """Say something in a subgroup; who has said it by now, as bits: see [Presence]."""
        bit = _bit(subgroup, self.rank)
        said = self.store.add(_came(kind, subgroup), 0) & bit  # perhaps by this rank in an earlier life
        self.store.set(_key(kind, subgroup, self.rank), value)
        if not said:
            self._told.append((kind, subgroup))
            if not (subgroup.level or self.one_block) and self.store.add(_left(kind, subgroup), 0) & bit:
                self.store.add(_left(kind, subgroup), _inverse(bit))
        return self.store.add(_came(kind, subgroup), 0 if said else bit)

    def take_back(self) -> None:
        """Unsay all of it, so that those who come later do not take this rank to be here.

        The values stay: who has just seen a bit reads one, and would wait in the store for what is not there.
        """
        while self._told:
            kind, subgroup = self._told.pop()
            bit = _bit(subgroup, self.rank)
            if not (subgroup.level or self.one_block):
                self.store.add(_left(kind, subgroup), bit)
            self.store.add(_came(kind, subgroup), _inverse(bit))

    def take(
        self, kind: str, subgroup: StoreSubgroup, value: bytes, see: Callable[[dict[int, bytes]], object]
    ) -> Iterator[Awaited]:
        """Say something and hear it of all others: `see` gets their values, each as soon as it is there."""
        here = self.tell(kind, subgroup, value)
        missing = [rank for rank in subgroup.members if rank != self.rank]
        while missing:
            arrived = [rank for rank in missing if here & _bit(subgroup, rank)]
            keys = [_key(kind, subgroup, rank) for rank in arrived]
            if arrived:
                values = self.store.multi_get(keys)
                see({rank: bytes(value) for rank, value in zip(arrived, values, strict=True)})
                missing = [rank for rank in missing if rank not in arrived]
            if missing:
                yield Awaited(kind, missing)
                here = self.store.add(_came(kind, subgroup), 0)

    def merge(
        self,
        kind: str,
        value: bytes,
        join: Callable[[list[bytes]], bytes],
        publish: Callable[[bytes], bytes] = bytes,
        from_level: int = 1,
    ) -> Generator[Awaited, None, bytes]:
        """Return what all say, joined in the order of ranks; `publish` makes of it what everybody reads.

        At level 1 each block's first rank speaks for it, with the `value` that all of the block know; at level 0 every
        rank brings its own.
        """
        for subgroup in self.subgroups[from_level:]:
            if subgroup.leader != self.rank:
                self.tell(kind, subgroup, value)
                break
            found = {self.rank: value}
            yield from self.take(kind, subgroup, value, found.update)
            value = join([found[rank] for rank in subgroup.members])
        if self.rank == 0:
            value = publish(value)
            self.store.set(result_key(kind), value)
            return value
        while not self.store.check([result_key(kind)]):
            yield Awaited(kind, [])
        return bytes(self.store.multi_get([result_key(kind)])[0])

    def values_of(self, kind: str, ranks: list[int]) -> Generator[Awaited, None, dict[int, bytes]]:
        """Return what ranks of other blocks said in theirs."""
        keys = [_key(kind, self._subgroup(0, rank), rank) for rank in ranks]
        while keys and not self.store.check(keys):
            yield Awaited(kind, [])
        values = self.store.multi_get(keys) if keys else []
        return {rank: bytes(value) for rank, value in zip(ranks, values, strict=True)}

    def said(self, kind: str) -> list[int]:
        """Return who has said it in its block, by a request for each block."""
        blocks = [self._subgroup(0, rank) for rank in range(0, self.size, self._spans[0][1])]
        bits = [self.store.add(_came(kind, block), 0) for block in blocks]
        return [
            rank for block, here in zip(blocks, bits, strict=True) for rank in block.members if here & _bit(block, rank)
        ]

    def laggards(self, kind: str) -> Laggards:
        """Return who keeps `merge` from coming to its end: looked for from the top, where something is missing."""
        found = Laggards([], [], [])
        open_ = [self._subgroup(len(self._spans) - 1, 0)]
        for _ in range(_MOST_LOOKS):
            if not open_:
                break
            subgroup = open_.pop()
            here = self.store.add(_came(kind, subgroup), 0)
            absent = [rank for rank in subgroup.members if not here & _bit(subgroup, rank)]
            if subgroup.level and absent:
                open_ += [self._subgroup(subgroup.level - 1, rank) for rank in reversed(absent)]
                continue
            were = self.store.add(_left(kind, subgroup), 0) if absent else 0
            left = [rank for rank in absent if were & _bit(subgroup, rank)]
            missing = [rank for rank in absent if rank not in left]
            holding = [subgroup.leader] if not missing and subgroup.leader not in left else []
            for ranks, more in zip(found, (missing, holding, left), strict=True):
                ranks += more
        return found

    def _subgroup(self, level: int, rank: int) -> StoreSubgroup:
        span, width = self._spans[level]
        first = rank // (span * width) * (span * width)
        return StoreSubgroup(level, range(first, min(first + span * width, self.size), span))


def result_key(kind: str) -> str:
    """The key under which the first rank publishes what came of a `merge`."""
    return f"{kind}/all"


def _key(kind: str, subgroup: StoreSubgroup, rank: int) -> str:
    return f"{kind}/{subgroup.level}/{rank}"


def _came(kind: str, subgroup: StoreSubgroup) -> str:
    return f"{kind}/{subgroup.level}/came-{subgroup.leader}"


def _left(kind: str, subgroup: StoreSubgroup) -> str:
    return f"{kind}/{subgroup.level}/left-{subgroup.leader}"


def _bit(subgroup: StoreSubgroup, rank: int) -> int:
    """The rank's bit in a number of 64 bits with a sign."""
    bit = 1 << subgroup.members.index(rank)
    return bit if bit < 1 << 63 else bit - (1 << 64)


def _inverse(bit: int) -> int:
    """Return what takes it away again; the last bit goes when it is added a second time, as nothing carries it."""
    return -bit if bit > 0 else bit
