"""Seconds and bytes of one collective on a cluster: the same schedules that are run, priced.

Schedules of many ranks are too long to walk through, so beyond a few dozen there are closed forms; for hosts of equal
size they say the same as `price` to the last bit of a second, which the tests compare.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any, NamedTuple

from gradsync.algorithms.builtin import Native, SharedMemory
from gradsync.algorithms.control_tree import MOST_GATHERED, hops, subgroup_sizes
from gradsync.algorithms.halving_doubling import HalvingDoubling
from gradsync.algorithms.hierarchical import Hierarchical
from gradsync.algorithms.price import LOOPBACK, MEMORY, Algorithm, price
from gradsync.algorithms.ring import Ring
from gradsync.algorithms.schedule import Recipe
from gradsync.algorithms.tree import Tree
from gradsync.cluster import Cluster, Link
from gradsync.planner import nccl

_MOST_RANKS_TO_WALK = 32


class CollectiveCost(NamedTuple):
    """The cost of one collective."""

    seconds: float
    nbytes: float  # that one rank sends to others, in its host or across; in shared memory nothing is sent
    load: float  # of the processor, meanwhile


class Collectives:
    """A calculator of what collectives cost on one cluster; it remembers what it worked out."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.num_hosts, self.size = len(cluster.hosts), cluster.world_size
        self.per_host = max(len(host) for host in cluster.hosts)
        self.in_memory = self.num_hosts == 1 and cluster.memory is not None
        # Over NCCL the host issues to a GPU's stream and goes on: what that takes is no part of a collective.
        self.on_stream = cluster.backend == "nccl"
        self._call_s = 0.0 if self.on_stream else cluster.device.call_s
        self._regular = all(len(host) == self.per_host for host in cluster.hosts)
        self._generation = nccl.generation_of(cluster.device.name)
        self.stages: dict[Hashable, Any] = {}  # of buckets; see `stages`
        self._known: dict[tuple[Algorithm, float], CollectiveCost] = {}

    @property
    def _as_measured(self) -> bool:
        """True where links tell what an all-reduce of all these ranks took: there is one tier, and a probe timed it."""
        return self.cluster.calibrated and 1 in (self.num_hosts, self.per_host)

    # Sums

    def candidates(self) -> list[Algorithm]:
        """The algorithms that could serve here."""
        if self.size == 1:
            return [Native()]
        if self.cluster.backend == "nccl":
            return [Native(), *([Hierarchical()] if self.num_hosts > 1 and self.per_host > 1 else [])]
        if self.num_hosts == 1:
            return [*([SharedMemory()] if self.in_memory else []), Native(), Ring(), Tree(), HalvingDoubling()]
        inside = [Hierarchical()] if self.per_host > 1 else []
        return [Native(), *inside, HalvingDoubling(), Tree(), Ring()]

    def resolve(self, algorithm: Algorithm | None, nbytes: float) -> Algorithm:
        """Return the algorithm, or for None the one that this comes to."""
        if algorithm is not None:
            return algorithm
        if self.cluster.backend == "nccl":
            return Native()
        if self.num_hosts == 1:
            return SharedMemory() if self.in_memory else Native()
        return min(self.candidates(), key=lambda each: self.sum(each, nbytes).seconds)

    def sum(self, algorithm: Algorithm | None, nbytes: float) -> CollectiveCost:
        """An all-reduce."""
        if self.size == 1:
            return CollectiveCost(0.0, 0.0, 0.0)
        algorithm = self.resolve(algorithm, nbytes)
        key = (algorithm, nbytes)
        if key not in self._known:
            self._known[key] = self._sum(algorithm, nbytes)
        return self._known[key]

    def _sum(self, algorithm: Algorithm, nbytes: float) -> CollectiveCost:
        cluster, n, m = self.cluster, self.size, self.num_hosts
        ring_nbytes = 2 * (n - 1) / n * nbytes
        if isinstance(algorithm, SharedMemory):
            memory = cluster.memory or cluster.inside
            seconds = 2 * memory.latency_s + 2 * nbytes / memory.bandwidth_at(nbytes) + self._call_s
            return CollectiveCost(seconds, 0.0, memory.load)
        if isinstance(algorithm, Native) and self.on_stream and not self._as_measured:
            costs = nccl.all_reduce_costs(
                nbytes, m, self.per_host, cluster.inside, cluster.across, cluster.shared_nic, self._generation
            )
            return CollectiveCost(min(costs).seconds, ring_nbytes, self._load())
        if isinstance(algorithm, Hierarchical):
            if cluster.memory is not None:
                cluster = replace(cluster, inside=cluster.memory)
            share = 2 * (m - 1) / m / self.per_host + self._inside_share()
            return CollectiveCost(self._hierarchical_s(nbytes, cluster), share * nbytes, self._load())
        if isinstance(algorithm, Native):  # measured: the time of a call as a ring's, whatever the backend did
            return CollectiveCost(self._ring_s(nbytes) + self._call_s, ring_nbytes, self._load())
        return self._scheduled(algorithm, nbytes)

    def _scheduled(self, algorithm: Recipe, nbytes: float) -> CollectiveCost:
        """An all-reduce that we run round by round, with Python in each."""
        n = self.size
        if n <= _MOST_RANKS_TO_WALK or not isinstance(algorithm, Ring | Tree | HalvingDoubling):
            schedule = algorithm.schedule(self.cluster.hosts)
            seconds, rounds = price(schedule, nbytes, self.cluster), len(schedule.rounds)
            sent = max(schedule.share_sent_by(rank) for rank in (0, n // 2)) * nbytes
        else:
            seconds, rounds, sent = self._closed_form(algorithm, nbytes)
        return CollectiveCost(seconds + rounds * self._call_s, sent, self._load())

    def _closed_form(self, algorithm: Ring | Tree | HalvingDoubling, nbytes: float) -> tuple[float, int, float]:
        n, gamma = self.size, self.cluster.reduce_s_per_byte
        if isinstance(algorithm, Ring):
            return self._ring_s(nbytes), 2 * (n - 1), 2 * (n - 1) / n * nbytes
        log = n.bit_length() - 1
        if isinstance(algorithm, HalvingDoubling):
            p = 1 << log
            seconds = 2 * sum(self._partners_s(nbytes / 2 ** (bit + 1), 1 << bit) for bit in range(log))
            seconds += (p - 1) / p * nbytes * gamma
            if n != p:
                seconds += 2 * self._partners_s(nbytes, 1) + nbytes * gamma
            return seconds, 2 * log + 2 * (n != p), 2 * (p - 1) / p * nbytes
        k = algorithm.num_pipeline_chunks
        rounds, half = 2 * (log + k - 1), n & (n - 1) == 0
        link = self._slowest(nbytes / (2 * k))
        seconds = rounds * link.latency_s + (rounds - half) / k * nbytes / link.bandwidth_at(nbytes / (2 * k))
        return seconds + (rounds - half) / (2 * k) * nbytes * gamma, rounds, 2 * nbytes

    def _ring_s(self, nbytes: float) -> float:
        """2(n − 1) rounds, each as long as the slowest message in it; a host's border is crossed once each way."""
        n, chunk = self.size, nbytes / self.size
        return 2 * (n - 1) * self._slowest(chunk).seconds(chunk) + (n - 1) * chunk * self.cluster.reduce_s_per_byte

    def _hierarchical_s(self, nbytes: float, cluster: Cluster) -> float:
        """The parts of `algorithms.hierarchical`, priced; many hosts of unequal size as if all were the largest."""
        if not self._regular and self.size <= _MOST_RANKS_TO_WALK:
            return price(Hierarchical().schedule(cluster.hosts), nbytes, cluster)
        g, m, gamma = self.per_host, self.num_hosts, cluster.reduce_s_per_byte
        block, chunk = nbytes / g, nbytes / g / m
        inside = 2 * (g - 1) * cluster.inside.seconds(block) + (g - 1) * block * gamma
        busy = chunk / cluster.across.bandwidth_at(chunk) * (g if cluster.shared_nic else 1)
        across = 2 * (m - 1) * (cluster.across.latency_s + busy) + (m - 1) * chunk * gamma
        return inside + across + self._call_s * (3 if cluster.backend == "gloo" else 0)

    def _partners_s(self, nbytes: float, distance: int) -> float:
        """All ranks exchange with one at this distance: inside a host as long as it is large enough."""
        if distance < self.per_host:
            return self.cluster.inside.seconds(nbytes)
        at_once = min(self.per_host, distance) if self.cluster.shared_nic else 1
        return self.cluster.across.latency_s + at_once * nbytes / self.cluster.across.bandwidth_at(nbytes)

    # Payloads that cannot be added up

    def gather(self, nbytes: float, size: int | None = None) -> CollectiveCost:
        """Everybody's payload of so many bytes to everybody; `size`: to one rank of each host only."""
        n = size or self.size
        if n == 1:
            return CollectiveCost(0.0, 0.0, 0.0)
        link = self._slowest(nbytes) if size is None else self.cluster.across
        if self.in_memory and self.cluster.memory is not None:
            memory = self.cluster.memory
            return CollectiveCost(
                2 * memory.latency_s + (n - 1) * nbytes / memory.bandwidth_at(nbytes), 0.0, memory.load
            )
        return CollectiveCost((n - 1) * link.seconds(nbytes) + self._call_s, (n - 1) * nbytes, self._load())

    def trade(self, nbytes: float, size: int | None = None) -> CollectiveCost:
        """A part of everybody's payload to everybody, all at once."""
        n = size or self.size
        if n == 1:
            return CollectiveCost(0.0, 0.0, 0.0)
        part, across, g = nbytes / n, self.cluster.across, 1 if size else self.per_host
        busy = [(g - 1) * part / self.cluster.inside.bandwidth_at(part)] if g > 1 else []
        if n > g:
            queue = g if self.cluster.shared_nic else 1
            busy.append((n - g) * queue * part / across.bandwidth_at(part))
        latency = across.latency_s if self.num_hosts > 1 else self.cluster.inside.latency_s
        seconds = latency + max(busy) + self._call_s
        return CollectiveCost(seconds, (n - 1) * part, self._load())

    def across(self, nbytes: float) -> CollectiveCost:
        """An all-reduce between one rank of each host."""
        m, link = self.num_hosts, self.cluster.across
        if m == 1:
            return CollectiveCost(0.0, 0.0, 0.0)
        return CollectiveCost(
            2 * (m - 1) * link.seconds(nbytes / m) + self._call_s, 2 * (m - 1) / m * nbytes, link.load
        )

    def within_hosts(self, nbytes: float) -> CollectiveCost:
        """A sum over the ranks of each host, all hosts at once."""
        g = self.per_host
        if g == 1:
            return CollectiveCost(0.0, 0.0, 0.0)
        if self.cluster.memory is not None:
            memory = self.cluster.memory
            return CollectiveCost(2 * memory.latency_s + 2 * nbytes / memory.bandwidth_at(nbytes), 0.0, memory.load)
        inside, sent = self.cluster.inside, self._inside_share() * nbytes
        return CollectiveCost(2 * (g - 1) * inside.seconds(nbytes / g) + self._call_s, sent, inside.load)

    # The links

    def _inside_share(self) -> float:
        """The share of its bytes that a rank sends in a sum inside each host."""
        return 0.0 if self.cluster.memory is not None else 2 * (self.per_host - 1) / self.per_host

    def header(self) -> CollectiveCost:
        """The few bytes that every synchronization begins or ends with: up the control tree and down again.

        Whatever gradients travel by, ranks agree in shared memory and by TCP.
        """
        memory, call_s = self.cluster.memory or MEMORY, self.cluster.device.call_s
        if self.size == 1:
            return CollectiveCost(0.0, 0.0, 0.0)
        if self.in_memory:
            return CollectiveCost(2 * memory.latency_s, 0.0, 0.0)
        if self.size <= MOST_GATHERED:
            return CollectiveCost(self._slowest(64.0).latency_s * self.size + call_s, 0.0, 0.0)
        on_gpus = self.cluster.backend == "nccl"
        if self.per_host == 1:
            within = 0.0
        elif on_gpus or self.cluster.memory is not None:
            within = 4 * memory.latency_s  # there and back
        else:
            within = hops(self.per_host) * self.cluster.inside.latency_s
        latency = max(self.cluster.across.latency_s, LOOPBACK.latency_s if on_gpus else 0.0)
        between = sum(hops(size) for size in subgroup_sizes(self.num_hosts)) * latency
        return CollectiveCost(within + between + call_s, 0.0, 0.0)

    def _slowest(self, nbytes: float) -> Link:
        """The link that a ring through all ranks waits for, with messages of this size."""
        links = [self.cluster.inside] * (self.per_host > 1) + [self.cluster.across] * (self.num_hosts > 1)
        return max(links, key=lambda link: link.seconds(nbytes))

    def _load(self) -> float:
        return self.cluster.across.load if self.num_hosts > 1 else self.cluster.inside.load
