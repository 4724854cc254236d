"""Neighbouring hosts in pairs: which link, or whose, is slower than the others.

hosts    a   b   c   d   e
round 1  a───b   c───d          a host is in one pair of a round, so links do not disturb each other
round 2      b───c   d───e
round 3  └───────────────┘      (with an odd number of hosts the last pair has a round of its own)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import NamedTuple

from gradsync.probe.probe_group import ProbeGroup
from gradsync.transport.link_speed import measure_pairs
from gradsync.units import show_bits

_SLOW = 0.5  # of what the faster quarter has


class HostPair(NamedTuple):
    """Two hosts, by index, and the bytes per second from the first to the second."""

    first: int
    second: int
    bandwidth: float


def rounds_of(num_hosts: int) -> list[list[tuple[int, int]]]:
    """The neighbours in a ring of hosts, in rounds.

    >>> rounds_of(2), rounds_of(5)
    ([[(0, 1)]], [[(0, 1), (2, 3)], [(1, 2), (3, 4)], [(4, 0)]])
    """
    pairs = [(host, (host + 1) % num_hosts) for host in range(num_hosts if num_hosts > 2 else 1)]
    alone = [pairs.pop()] if num_hosts > 2 and num_hosts % 2 else []
    return [some for some in (pairs[::2], pairs[1::2], alone) if some]


def measure_neighbours(group: ProbeGroup) -> list[HostPair]:
    """Every pair's bandwidth; every rank of the group calls this, all get the same."""
    pairs: list[HostPair] = []
    for together in rounds_of(len(group.hosts)):
        links = measure_pairs(group.lane, [(group.hosts[a][0], group.hosts[b][0]) for a, b in together])
        pairs += [HostPair(a, b, link.bandwidth) for (a, b), link in zip(together, links, strict=True)]
    return pairs


def slow_links(pairs: Sequence[HostPair], name_of_host: Callable[[int], str]) -> list[str]:
    """A sentence for each host whose links are all slow, and for each other slow link.

    >>> fast, slow = 9.4e9 / 8, 1.1e9 / 8
    >>> ring = [HostPair(0, 1, fast), HostPair(1, 2, slow), HostPair(2, 3, fast), HostPair(3, 0, fast)]
    >>> slow_links(ring, "abcd".__getitem__)
    ['b ↔ c: 1.1 Gbit/s, the others have 9.4 Gbit/s']
    >>> slow_links([HostPair(0, 1, slow), HostPair(1, 2, slow), HostPair(2, 0, fast)], "abc".__getitem__)
    ['b: 1.1 Gbit/s to its neighbours, the others have 9.4 Gbit/s']
    """
    if len(pairs) < 2:
        return []
    rates = sorted(pair.bandwidth for pair in pairs)
    usual = rates[ceil(0.75 * (len(rates) - 1))]
    slow = [pair for pair in pairs if pair.bandwidth < _SLOW * usual]
    others = f"the others have {show_bits(usual)}"
    said: list[str] = []
    for host in sorted({host for pair in slow for host in pair[:2]}):
        own = [pair for pair in pairs if host in pair[:2]]
        if len(own) > 1 and all(pair in slow for pair in own):
            slow = [pair for pair in slow if pair not in own]
            said.append(
                f"{name_of_host(host)}: {show_bits(max(pair.bandwidth for pair in own))} to its neighbours, {others}"
            )
    return said + [
        f"{name_of_host(pair.first)} ↔ {name_of_host(pair.second)}: {show_bits(pair.bandwidth)}, {others}"
        for pair in slow
    ]
