"""What the wires can do, as data: hosts of ranks, the link inside a host and the link between hosts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Hosts = tuple[tuple[int, ...], ...]


def as_hosts(hosts: int | Sequence[Sequence[int]]) -> Hosts:
    """The ranks of each host; a number of ranks means one host that holds them all.

    >>> as_hosts(3), as_hosts([[0, 2], [1]])
    (((0, 1, 2),), ((0, 2), (1,)))
    """
    if isinstance(hosts, int):
        if isinstance(hosts, bool) or hosts < 1:
            raise ValueError(f"hosts must be a number of ranks of at least 1, or the ranks of each host, got {hosts!r}")
        return (tuple(range(hosts)),)
    named = tuple(tuple(host) for host in hosts)
    ranks = [rank for host in named for rank in host]
    if not ranks or not all(named) or any(type(rank) is not int for rank in ranks):
        raise ValueError(f"hosts must be one list of ranks per host, none of them empty, got {hosts!r}")
    if sorted(ranks) != list(range(len(ranks))):
        raise ValueError(f"hosts must name every rank from 0 to {len(ranks) - 1} once, got {hosts!r}")
    return named


@dataclass(frozen=True)
class Link:
    """A wire: a message of b bytes takes `latency_s + b / bandwidth` seconds.

    Args:
        latency_s: Seconds until the first byte is there, whatever the size.
        bandwidth: Bytes per second, each way at once.

    >>> Link(latency_s=50e-6, bandwidth=125e6)
    Link(latency_s=5e-05, bandwidth=125000000.0)
    """

    latency_s: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not _is_number(self.latency_s) or self.latency_s < 0:
            raise ValueError(f"Link: latency_s must be a number of seconds, 0 or more, got {self.latency_s!r}")
        if not _is_number(self.bandwidth) or self.bandwidth <= 0:
            raise ValueError(f"Link: bandwidth must be a positive number of bytes per second, got {self.bandwidth!r}")


@dataclass(frozen=True)
class Cluster:
    """Hosts and their links.

    Args:
        hosts: The ranks of each host; see `as_hosts`.
        inside: The link between two ranks of one host.
        across: The link between two hosts.
        shared_nic: True: the ranks of a host share one `across` link. False: each has its own.
        reduce_s_per_byte: Seconds to add one received byte to one's own.

    >>> cluster = Cluster(((0, 1), (2, 3)), inside=Link(1e-6, 1e10), across=Link(50e-6, 125e6))
    >>> cluster.world_size, cluster.host_by_rank()
    (4, {0: 0, 1: 0, 2: 1, 3: 1})
    """

    hosts: Hosts
    inside: Link
    across: Link
    shared_nic: bool = True
    reduce_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", as_hosts(self.hosts))  # lists become tuples: a cluster can be a key
        if not _is_number(self.reduce_s_per_byte) or self.reduce_s_per_byte < 0:
            raise ValueError(
                "Cluster: reduce_s_per_byte must be a number of seconds per byte, 0 or more, "
                f"got {self.reduce_s_per_byte!r}"
            )

    @property
    def world_size(self) -> int:
        return sum(len(host) for host in self.hosts)

    def host_by_rank(self) -> dict[int, int]:
        """The index of each rank's host."""
        return {rank: index for index, host in enumerate(self.hosts) for rank in host}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
