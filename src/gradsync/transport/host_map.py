"""The map of who shares a host, in few bytes: a block's ranks joined with what other blocks found. Pure.

Ranks are said as progressions, and hosts that look alike once: so hosts of equally many ranks in order, or dealt out
in turns, take a line however many they are.

    ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))   →   [[[[0, 4, 1]], 3, 4]]   0 and 3 more, 1 apart; 3 such, 4 apart
    ((0, 3, 6), (1, 4, 7), (2, 5, 8))              →   [[[[0, 3, 3]], 3, 1]]
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

from gradsync.cluster import Hosts
from gradsync.errors import GradSyncError

_Run = list[int]  # first, how many, how far apart
_MOST_BYTES = 1 << 28


class HostMap:
    """The ranks of each host, by index in the group."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts

    @cached_property
    def number(self) -> dict[int, int]:
        """The number of each rank's host."""
        return {rank: number for number, host in enumerate(self.hosts) for rank in host}

    def mates(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of its host, itself included."""
        return self.hosts[self.number[rank]]

    def without(self, broken: Iterable[int]) -> HostMap:
        """A map in which each rank of these hosts counts as a host of its own.

        >>> HostMap(((0, 2), (1, 3))).without([0]).hosts
        ((0,), (1, 3), (2,))
        """
        apart = set(broken)
        if not apart:
            return self
        parts = [[host] if n not in apart else [(rank,) for rank in host] for n, host in enumerate(self.hosts)]
        return HostMap(tuple(sorted(host for part in parts for host in part)))


def together(identities: Mapping[int, bytes]) -> HostMap:
    """The map of ranks that say so of themselves.

    >>> together({0: b"a", 1: b"b", 2: b"a"}).hosts
    ((0, 2), (1,))
    """
    hosts: dict[bytes, list[int]] = {}
    for rank in sorted(identities):
        hosts.setdefault(identities[rank], []).append(rank)
    return HostMap(tuple(sorted(tuple(ranks) for ranks in hosts.values())))


# What goes up: who is on which host, by its identity


def summary(identities: Mapping[int, bytes]) -> bytes:
    """Return the summary of what these ranks say."""
    hosts: dict[str, list[int]] = {}
    for rank in sorted(identities):
        hosts.setdefault(identities[rank].hex(), []).append(rank)
    return _dump({identity: _runs(ranks) for identity, ranks in hosts.items()})


def joined(summaries: Sequence[bytes], size: int) -> bytes:
    """Return what all of these summaries say, as one."""
    hosts: dict[str, list[int]] = {}
    for said in summaries:
        table = _load(said)
        if not isinstance(table, dict):
            raise _refusal(size)
        for identity, runs in table.items():
            hosts.setdefault(identity, []).extend(_ranks(runs, size))
    return _dump({identity: _runs(sorted(ranks)) for identity, ranks in hosts.items()})


# What comes down: who is with whom


def published(said: bytes, size: int) -> bytes:
    """The map that everybody reads, of a group of so many ranks."""
    hosts = sorted(tuple(_ranks(runs, size)) for runs in _load(said).values())
    alike: list[list[Any]] = []  # runs of the first host, how many such hosts, how far apart
    for runs in map(_runs, hosts):
        if alike:
            pattern, count, shift = alike[-1]
            apart = runs[0][0] - pattern[0][0] - (count - 1) * shift
            if (count == 1 or apart == shift) and runs == _shifted(pattern, (count - 1) * shift + apart):
                alike[-1] = [pattern, count + 1, apart]
                continue
        alike.append([runs, 1, 0])
    return _dump(alike)


@lru_cache(maxsize=4)
def read_map(said: bytes, size: int) -> HostMap:
    """The map that `published` wrote; raises where it is none of `size` ranks."""
    hosts: list[tuple[int, ...]] = []
    num_ranks = 0
    for entry in _list(_load(said), size):
        if not (isinstance(entry, list) and len(entry) == 3) or not all(_is_number(n, size) for n in entry[1:]):
            raise _refusal(size)
        pattern, count, shift = entry
        for number in range(count):
            ranks = _ranks(_shifted(_list(pattern, size), number * shift), size)
            num_ranks += len(ranks)
            if not ranks or num_ranks > size:
                raise _refusal(size)
            hosts.append(tuple(ranks))
    if sorted(rank for host in hosts for rank in host) != list(range(size)):
        raise _refusal(size)
    return HostMap(tuple(sorted(hosts)))


def said(ranks: Sequence[int]) -> bytes:
    """Rising numbers, for `numbers` to read."""
    return _dump(list(ranks))


def united(parts: Sequence[bytes], size: int) -> bytes:
    """Return all numbers of several lists, as one list."""
    return said(sorted({number for part in parts for number in numbers(part, size)}))


def numbers(text: bytes, size: int) -> list[int]:
    """Rising whole numbers below `size`, as some rank listed them; raises where they are none."""
    found = _list(_load(text), size)
    if not all(_is_number(n, size - 1) for n in found) or any(a >= b for a, b in pairwise(found)):
        raise _refusal(size)
    return found


def _runs(ranks: Sequence[int]) -> list[_Run]:
    """Rising ranks as progressions.

    >>> _runs([0, 1, 2, 3]), _runs([1, 5, 9, 10, 11])
    ([[0, 4, 1]], [[1, 3, 4], [10, 2, 1]])
    """
    runs: list[_Run] = []
    for rank in ranks:
        if runs:
            first, count, apart = runs[-1]
            if count == 1 or rank == first + count * apart:
                runs[-1] = [first, count + 1, rank - first if count == 1 else apart]
                continue
        runs.append([rank, 1, 1])
    return runs


def _ranks(runs: Any, size: int) -> list[int]:
    """The ranks that progressions say, rising; raises where they are none of `size`."""
    ranks: list[int] = []
    for run in _list(runs, size):
        if not (isinstance(run, list) and len(run) == 3) or not all(_is_number(n, size) for n in run):
            raise _refusal(size)
        first, count, apart = run
        if first + (count - 1) * apart >= size or (count > 1 and apart == 0) or len(ranks) + count > size:
            raise _refusal(size)
        ranks += [first + n * apart for n in range(count)]
    return sorted(ranks)


def _shifted(runs: list[Any], by: int) -> list[Any]:
    return [[run[0] + by, *run[1:]] if isinstance(run, list) and run and type(run[0]) is int else run for run in runs]


def _list(said: Any, size: int) -> list[Any]:
    if not isinstance(said, list) or len(said) > size:
        raise _refusal(size)
    return said


def _is_number(said: Any, size: int) -> bool:
    return type(said) is int and 0 <= said <= size


def _dump(said: Any) -> bytes:
    return json.dumps(said, separators=(",", ":")).encode()


def _load(said: bytes) -> Any:
    try:
        return json.loads(said) if len(said) <= _MOST_BYTES else None
    except (ValueError, RecursionError):
        return None


def _refusal(size: int) -> GradSyncError:
    return GradSyncError(
        f"what the store says of the hosts is no map of {size} ranks: see whether anything else writes to that store"
    )
