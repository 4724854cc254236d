"""What a schedule costs on given links, in seconds."""

from __future__ import annotations

from collections import defaultdict

from gradsync.allreduce.schedule import Round, Schedule
from gradsync.links import Cluster

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

    >>> from gradsync.allreduce.pricing import price
    >>> from gradsync.allreduce.ring import ring
    >>> from gradsync.links import Cluster, Link, as_hosts
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
