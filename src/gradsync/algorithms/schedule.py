"""An all-reduce algorithm as data: rounds of transfers.

    before a round      the transfers of one round, all at once      after it
    rank 0  chunk 1  ──────────── Transfer(0, 1, chunk=1, add=True) ──▶  rank 1 has its own chunk 1 + rank 0's
    rank 1  chunk 0  ──────────── Transfer(1, 0, chunk=0, add=False) ─▶  rank 0 has rank 1's chunk 0

Every transfer of a round reads what its sender held before the round. Several additions to one chunk of
one rank happen in the order in which the round lists them, so that a schedule fixes every bit of its result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, zip_longest
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Transfer:
    """`src` sends its value of `chunk` to `dst`, which adds it to its own, or puts it in its place."""

    src: int
    dst: int
    chunk: int
    add: bool


Round = tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The transfers: who sends what to whom, and when. Well-formed by construction; `check` proves that it adds up.

    >>> Schedule(2, 1, ((Transfer(1, 0, 0, add=True),), (Transfer(0, 1, 0, add=False),))).num_transfers
    2
    """

    world_size: int
    num_chunks: int
    rounds: tuple[Round, ...]

    def __post_init__(self) -> None:
        for name, value in (("world_size", self.world_size), ("num_chunks", self.num_chunks)):
            if type(value) is not int or value < 1:
                raise ValueError(f"Schedule: {name} must be a whole number of at least 1, got {value!r}")
        for number, transfers in enumerate(self.rounds, 1):
            for transfer in transfers:
                self._refuse_misfit(number, transfer)

    def _refuse_misfit(self, number: int, transfer: Transfer) -> None:
        # Exact types, so that nothing but digits can ever come out where a schedule is drawn.
        plain = type(transfer.add) is bool
        for value, limit in (
            (transfer.src, self.world_size),
            (transfer.dst, self.world_size),
            (transfer.chunk, self.num_chunks),
        ):
            plain = plain and type(value) is int and 0 <= value < limit
        if not plain or transfer.src == transfer.dst:
            raise ValueError(
                f"Schedule: round {number} has {transfer}, which is no transfer between two of "
                f"{self.world_size} ranks of one of {self.num_chunks} chunks"
            )

    @property
    def num_transfers(self) -> int:
        return sum(len(transfers) for transfers in self.rounds)

    def share_sent_by(self, rank: int) -> float:
        """Return how many times the data one rank sends in all.

        >>> Schedule(2, 2, ((Transfer(0, 1, 0, add=True), Transfer(0, 1, 1, add=True)),)).share_sent_by(0)
        1.0
        """
        return sum(t.src == rank for transfers in self.rounds for t in transfers) / self.num_chunks


@runtime_checkable
class Recipe(Protocol):
    """A recipe that makes a schedule for any ranks; frozen data, so that plans compare across ranks."""

    def schedule(self, hosts: int | Sequence[Sequence[int]]) -> Schedule:
        """The rounds for these hosts, or for this number of ranks on one host."""
        ...

    def __hash__(self) -> int: ...


def chunk_bounds(numel: int, num_chunks: int) -> tuple[tuple[int, int], ...]:
    """Return where each chunk begins and ends; sizes differ by at most one element, the larger ones first.

    >>> chunk_bounds(10, 4)
    ((0, 3), (3, 6), (6, 8), (8, 10))
    """
    if numel < 0 or num_chunks < 1:
        raise ValueError(f"chunk_bounds needs numel >= 0 and num_chunks >= 1, got {numel} and {num_chunks}")
    size, larger = divmod(numel, num_chunks)
    starts = [index * size + min(index, larger) for index in range(num_chunks + 1)]
    return tuple(pairwise(starts))


def side_by_side(parts: Iterable[Sequence[Round]]) -> list[Round]:
    """Parts that do not touch each other's chunks, run at once: round k is round k of each."""
    return [tuple(chain.from_iterable(together)) for together in zip_longest(*parts, fillvalue=())]
