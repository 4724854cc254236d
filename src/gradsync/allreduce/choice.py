"""Which algorithm for how many bytes, on given links: the cheapest by `price`."""

from __future__ import annotations

from dataclasses import replace

from gradsync.allreduce.halving_doubling import HalvingDoubling
from gradsync.allreduce.hierarchical import Hierarchical
from gradsync.allreduce.native import Native
from gradsync.allreduce.pricing import price
from gradsync.allreduce.ring import Ring
from gradsync.allreduce.schedule import Schedule
from gradsync.allreduce.shared_memory import SharedMemory
from gradsync.allreduce.tree import Tree
from gradsync.links import Cluster, Link

Algorithm = Native | Ring | Tree | HalvingDoubling | Hierarchical | SharedMemory

# Between hosts, until somebody measures: 10 Gbit/s Ethernet with TCP.
DEFAULT_ACROSS = Link(latency_s=100e-6, bandwidth=1.1e9)
# Between ranks of one host: loopback TCP, and shared memory where the C library is built.
LOOPBACK = Link(latency_s=50e-6, bandwidth=1.5e9)
MEMORY = Link(latency_s=5e-6, bandwidth=8e9)

CANDIDATES = (Hierarchical(), HalvingDoubling(), Tree(), Ring())

# Python takes part in every round of a schedule that we run ourselves; a backend's own needs it once.
_ROUND_S = 100e-6
# And sending a byte takes a processor that could be computing gradients meanwhile: TCP's copies.
_SEND_S_PER_BYTE = 0.5e-9


def cheapest(nbytes: int, cluster: Cluster, memory: Link | None = None) -> Algorithm:
    """The algorithm with the lowest cost; the backend's own ring is charged as a ring without Python.

    `memory` is what the ranks of a host share, if they do: hierarchical uses it instead of `cluster.inside`.

    >>> two_hosts = Cluster(((0, 1), (2, 3)), inside=LOOPBACK, across=DEFAULT_ACROSS)
    >>> cheapest(25 << 20, two_hosts, MEMORY), cheapest(64, Cluster(((0,), (1,)), LOOPBACK, DEFAULT_ACROSS))
    (Hierarchical(), Native())
    """
    everything: tuple[Algorithm, ...] = (Native(), *CANDIDATES)
    return min(everything, key=lambda algorithm: cost(algorithm, nbytes, cluster, memory))


def cost(algorithm: Algorithm, nbytes: int, cluster: Cluster, memory: Link | None = None) -> float:
    """Seconds that an all-reduce of `nbytes` should take, with what running it costs beside the links."""
    if isinstance(algorithm, SharedMemory):
        inside = memory or cluster.inside
        return 2 * inside.latency_s + 2 * nbytes / inside.bandwidth
    if isinstance(algorithm, Hierarchical) and memory is not None:
        cluster = replace(cluster, inside=memory)
    recipe = Ring() if isinstance(algorithm, Native) else algorithm
    schedule = recipe.schedule(cluster.hosts)
    rounds = 1 if isinstance(algorithm, Native) else len(schedule.rounds)
    sent = schedule if memory is None or not isinstance(algorithm, Hierarchical) else _across(cluster)
    most = max(sent.share_sent_by(rank) for rank in range(sent.world_size))
    return price(schedule, nbytes, cluster) + rounds * _ROUND_S + most * nbytes * _SEND_S_PER_BYTE


def _across(cluster: Cluster) -> Schedule:
    return Hierarchical().levels(cluster.hosts).across_schedule()
