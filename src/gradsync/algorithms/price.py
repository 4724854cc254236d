"""The price of a schedule on given links, in seconds, and the cheapest algorithm for each number of bytes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from gradsync.algorithms.builtin import Native, SharedMemory
from gradsync.algorithms.halving_doubling import HalvingDoubling
from gradsync.algorithms.hierarchical import Hierarchical
from gradsync.algorithms.ring import Ring
from gradsync.algorithms.schedule import Recipe, Round, Schedule
from gradsync.algorithms.tree import Tree
from gradsync.cluster import Cluster, Link

# Where bytes queue: a rank's ways out and in, which are others inside its host than across ("out" | "in" | "far out" |
# "far in", rank), and ("leaves" | "enters", host) where the ranks of a host share a NIC.
Port = tuple[str, int]


def price(schedule: Schedule, nbytes: float, cluster: Cluster) -> float:
    """Seconds for an all-reduce of `nbytes`: the rounds one after another, each as long as its slowest port.

    A round with two ranks on each host and one shared NIC:

        rank 0 ─out─┐                      ┌─in─ rank 2     bytes queue at every port they pass;
                    ├─leaves A ── enters B─┤                latencies of one port pass together;
        rank 1 ─out─┘                      └─in─ rank 3     ways out and in do not disturb each other,
                                                            nor do a rank's ways inside its host and across
    What arrived is added when all of it is there, at `cluster.reduce_s_per_byte`.

    >>> from gradsync.algorithms.price import price
    >>> from gradsync.algorithms.ring import ring
    >>> from gradsync.cluster import Cluster, Link, as_hosts
    >>> wire = Link(latency_s=50e-6, bandwidth=125e6)
    >>> round(price(ring().schedule(4), 25e6, Cluster(as_hosts(4), inside=wire, across=wire)), 6)
    0.3003
    """
    if schedule.world_size != cluster.world_size:
        raise ValueError(
            f"the schedule is for {schedule.world_size} ranks, the cluster has {cluster.world_size}; "
            "make it with recipe.schedule(cluster.hosts)"
        )
    if not 0 <= nbytes < float("inf"):
        raise ValueError(f"nbytes must be a number of bytes, 0 or more, got {nbytes!r}")
    host_of = cluster.host_by_rank()
    chunk_nbytes = nbytes / schedule.num_chunks
    return sum(_round_s(transfers, chunk_nbytes, cluster, host_of) for transfers in schedule.rounds)


def _round_s(transfers: Round, chunk_nbytes: float, cluster: Cluster, host_of: dict[int, int]) -> float:
    latency_s: dict[Port, float] = defaultdict(float)
    busy_s: dict[Port, float] = defaultdict(float)
    num_adds: dict[int, int] = defaultdict(int)
    num_chunks: dict[tuple[int, int], int] = defaultdict(int)  # of the message from one rank to another
    for t in transfers:
        num_chunks[t.src, t.dst] += 1
        num_adds[t.dst] += t.add
    for (src, dst), count in num_chunks.items():
        crosses = host_of[src] != host_of[dst]
        link = cluster.across if crosses else cluster.inside
        ports: list[Port] = [("far out", src), ("far in", dst)] if crosses else [("out", src), ("in", dst)]
        if crosses and cluster.shared_nic:
            ports += [("leaves", host_of[src]), ("enters", host_of[dst])]
        nbytes = count * chunk_nbytes
        for port in ports:
            latency_s[port] = max(latency_s[port], link.latency_s)
            busy_s[port] += nbytes / link.bandwidth_at(nbytes)
    slowest = max((latency_s[port] + busy_s[port] for port in busy_s), default=0.0)
    return slowest + max(num_adds.values(), default=0) * chunk_nbytes * cluster.reduce_s_per_byte


Algorithm = Native | SharedMemory | Recipe  # ring, tree, halving-doubling, hierarchical; and whoever makes another

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
