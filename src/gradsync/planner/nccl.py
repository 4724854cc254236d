"""The cost of NCCL's own all-reduce, by its own model: latency + bytes / bandwidth of each algorithm and protocol.

NCCL (2.30, graph/tuning.cc) prices every pair and takes the cheapest; so does this. Its constants are kept: base and
hop latencies, the caps of a protocol per GPU generation, what trees lose at middle sizes. Its bandwidths come from a
search over the machine's topology, ours from two links:

    inside   the bus bandwidth that large all-reduces reach within a host, by the best algorithm there (NVLS, if any)
    across   what a NIC carries; a host has one (shared) or one per rank

How a NIC limits them, for S bytes on m hosts of n ranks together:

    ring     every chunk passes every host's border:              2(n−1)/n·S through each host's NICs
    trees    a host adds up within, and sends one sum each way:   2(m−1)/m·S

Two hosts of 8 are 1.875 times as many bytes on the ring. Inside and across run at once, as a pipeline: the slower one
counts. Only large-message bandwidths and the latency across are taken from the links.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from gradsync.cluster import Link

Generation = Literal["volta", "ampere", "hopper", "blackwell"]
Name = Literal["ring", "tree", "NVLS", "NVLSTree"]
Protocol = Literal["LL", "LL128", "Simple"]


class Caps(NamedTuple):
    """The most that a generation reaches, in GB/s, on one, two and more hosts; all but `ll` per channel."""

    channels: int
    ll: tuple[float, float, float]
    ring_ll128: float
    tree_ll128: tuple[float, float, float]
    tree: tuple[float, float, float]
    nvls_tree: tuple[float, float, float]
    ring_share: float  # what a ring reaches of what NVLS reaches


# A ring on 8 H100 reaches 370 GB/s, NVLS 480; on Blackwell, NVLS loses more of the wire to overhead (0.74 : 0.85).
# Across hosts, NCCL takes the LL caps of an Intel machine from the oldest row, whatever the GPU.
CAPS: dict[Generation, Caps] = {
    "volta": Caps(2, (39, 39, 20.4), 20, (20, 20, 20), (26.5, 18.5, 10), (0, 0, 0), 1.0),
    "ampere": Caps(8, (87.7, 39, 20.4), 20, (20, 20, 20), (24, 23.6, 17.8), (0, 0, 0), 1.0),
    "hopper": Caps(16, (141, 39, 20.4), 36.7, (36.7, 36.7, 29), (38.7, 41.4, 36), (0, 57.7, 45.5), 370 / 480),
    "blackwell": Caps(32, (282, 39, 20.4), 40, (55.6, 31.67, 20), (70, 42.8, 24), (0, 96, 80), 370 / 480 * 0.85 / 0.74),
}
BASE_US: dict[Name, dict[Protocol, float]] = {
    "ring": {"LL": 6.6, "LL128": 14.0, "Simple": 8.4},
    "tree": {"LL": 6.8, "LL128": 14.0, "Simple": 8.4},
    "NVLS": {"Simple": 0.0},
    "NVLSTree": {"Simple": 0.0},
}
NVLINK_US: dict[Name, dict[Protocol, float]] = {
    "ring": {"LL": 0.6, "LL128": 1.9, "Simple": 3.4},
    "tree": {"LL": 0.6, "LL128": 1.25, "Simple": 4.0},
    "NVLS": {"Simple": 25.0},
    "NVLSTree": {"Simple": 25.0},
}
PCI_US: dict[Name, dict[Protocol, float]] = {
    "ring": {"LL": 1.0, "LL128": 2.5, "Simple": 5.7},
    "tree": {"LL": 1.0, "LL128": 1.9, "Simple": 4.0},
}
NET_US: dict[Name, dict[Protocol, float]] = {
    "ring": {"LL": 2.7, "LL128": 4.0, "Simple": 14.0},
    "tree": {"LL": 5.0, "LL128": 8.5, "Simple": 14.0},
    "NVLSTree": {"Simple": 20.9},
}
# What is left of a tree's bandwidth, for 64 bytes, 128, 256 and so on; all of it beyond.
_TREE_LEFT: dict[Protocol, str] = {
    "LL": "1 1 1 1 .9 .8 .7 .7 .7 .7 .6 .5 .4 .4 .5 .6 .7 .8 .9 1 1 1 1",
    "LL128": "1 1 1 1 1 .9 .8 .8 .8 .7 .6 .6 .6 .6 .6 .6 .8 .9 .9 .9 .9 1 1",
    "Simple": ".9 .9 .9 .9 .9 .9 .9 .8 .7 .6 .6 .5 .5 .5 .5 .6 .7 .8 .7 .7 .8 .9 .9",
}
TREE_LEFT = {protocol: tuple(float(share) for share in row.split()) for protocol, row in _TREE_LEFT.items()}


class NcclCost(NamedTuple):
    """One all-reduce, and how NCCL would do it."""

    seconds: float
    algorithm: Name
    protocol: Protocol


# PCIe 5 x16 is 48 GB/s to NCCL, the slowest NVLink box 120: below this, GPUs of a host talk over PCIe.
_NVLINK_FROM = 60e9
_RDMA_US = 14.0

# By what stands in a device's name, the catalogue's ("h100-pcie") or the driver's ("NVIDIA H100 80GB HBM3").
_NAMES: dict[Generation, str] = {
    "volta": r"v100|t4|titan v|rtx ?20\d\d",
    "hopper": r"h[12]00|h800|h20\b",
    "blackwell": r"b[123]00|rtx ?50\d\d",
}


def generation_of(device: str) -> Generation:
    """Return the generation whose constants NCCL takes for a GPU; Ampere for one that is not known here.

    >>> generation_of("a100"), generation_of("NVIDIA H200"), generation_of("gb200"), generation_of("t4")
    ('ampere', 'hopper', 'blackwell', 'volta')
    """
    for generation, pattern in _NAMES.items():
        if re.search(pattern, device.lower()):
            return generation
    return "ampere"


def all_reduce_costs(
    nbytes: float,
    num_hosts: int,
    per_host: int,
    inside: Link,
    across: Link,
    shared_nic: bool = True,
    generation: Generation = "ampere",
) -> list[NcclCost]:
    """Every way that NCCL has there; it takes the cheapest. One rank alone sends nothing, in no time.

    >>> nvlink3, ethernet = Link(2e-6, 230e9), Link(2e-6, 11e9)
    >>> cost = min(all_reduce_costs(2e9, 1, 8, nvlink3, ethernet))
    >>> round(cost.seconds * 1e3, 1), cost.algorithm, cost.protocol
    (15.3, 'ring', 'Simple')
    >>> cost = min(all_reduce_costs(2e9, 2, 8, nvlink3, ethernet))
    >>> round(cost.seconds * 1e3, 1), cost.algorithm, cost.protocol
    (197.7, 'tree', 'Simple')
    """
    _check(nbytes, num_hosts, per_host, generation)
    if num_hosts * per_host == 1:
        return [NcclCost(0.0, "ring", "LL")]
    caps = CAPS[generation]
    nvlink = per_host == 1 or inside.bandwidth >= _NVLINK_FROM
    costs = []
    for algorithm, protocol in _algorithms(num_hosts, per_host, nvlink, caps):
        lat_us = latency_us(algorithm, protocol, num_hosts, per_host, across.latency_s, nvlink)
        large = nbytes / (caps.channels * num_hosts * per_host) >= 64
        if algorithm == "ring" and protocol == "Simple" and num_hosts > 1 and large:
            lat_us *= 1.9 if generation == "volta" else 1.4
        seconds = 0.0
        if nbytes > 0:
            nic = across.bandwidth * (1 if shared_nic else per_host)
            ring_share = caps.ring_share if nvlink and per_host > 1 else 1.0
            links = _Links(num_hosts, per_host, inside.bandwidth / 1e9, nic / 1e9, ring_share)
            seconds = nbytes / (1e9 * _algorithm_bandwidth(algorithm, protocol, nbytes, links, caps))
        costs.append(NcclCost(lat_us * 1e-6 + seconds, algorithm, protocol))
    return costs


def latency_us(
    algorithm: Name, protocol: Protocol, num_hosts: int, per_host: int, net_s: float = 0.0, nvlink: bool = True
) -> float:
    """Microseconds of an empty all-reduce, before what a large one adds.

    NCCL's network hops are those of RDMA, the longest of them 14 us. What a wire takes beyond that is added, as NCCL
    adds what a NIC reports: twice where the receiver must first say that it is ready (Simple).

    >>> round(latency_us("ring", "Simple", num_hosts=2, per_host=8), 1)
    131.6
    """
    intra = (NVLINK_US if nvlink else PCI_US)[algorithm][protocol]
    inter = 0.0
    if num_hosts > 1:
        hop = NET_US["tree" if algorithm == "ring" and per_host == 1 else algorithm][protocol]
        inter = hop + max(0.0, net_s * 1e6 - _RDMA_US) * (2 if protocol == "Simple" else 1)
    base, levels = BASE_US[algorithm][protocol], math.floor(math.log2(num_hosts))
    if algorithm == "ring":
        steps, far = 2 * (num_hosts * per_host - 1), 2 * (num_hosts - 1)
        overhead = 0.0 if num_hosts == 1 else 3.0 if protocol == "Simple" else 1.0
        return base + (steps - far) * max(intra, overhead) + far * inter
    if algorithm == "tree":
        return base + 2 * ((per_host - 1) * intra + levels * inter)
    return base + intra + 2 * levels * inter


class _Links(NamedTuple):
    num_hosts: int
    per_host: int
    inside: float  # GB/s, as NCCL counts
    nic: float  # of all NICs of a host
    ring_share: float


def _algorithms(num_hosts: int, per_host: int, nvlink: bool, caps: Caps) -> Iterator[tuple[Name, Protocol]]:
    algorithms: tuple[Name, ...] = ("ring", "tree")
    for algorithm in algorithms:
        yield algorithm, "LL"
        yield algorithm, "Simple"
        if nvlink:
            yield algorithm, "LL128"
    if caps.nvls_tree[-1] and nvlink and per_host > 1:
        yield ("NVLS" if num_hosts == 1 else "NVLSTree"), "Simple"


def _algorithm_bandwidth(algorithm: Name, protocol: Protocol, nbytes: float, links: _Links, caps: Caps) -> float:
    """GB/s of the caller's bytes."""
    column = min(links.num_hosts, 3) - 1
    n, hosts = links.num_hosts * links.per_host, links.num_hosts
    near = links.inside if links.per_host > 1 else math.inf
    if algorithm in ("NVLS", "NVLSTree"):
        far = links.nic / (2 * (hosts - 1) / hosts) if hosts > 1 else math.inf
        cap = caps.channels * caps.nvls_tree[column] if hosts > 1 else math.inf
        return min(min(near, cap) * n / (2 * (n - 1)), far)
    near *= links.ring_share
    if algorithm == "ring":
        return _ring_bus(protocol, min(near, links.nic) if hosts > 1 else near, column, caps) * n / (2 * (n - 1))
    # The loss at middle sizes is one of the fast pipeline within a host; a slow NIC hides it.
    left = TREE_LEFT[protocol]
    index = math.floor(math.log2(max(nbytes, 64) / 64))
    near = min(near, caps.channels * caps.tree[column] / 0.92) * (left[index] if index < len(left) else 1.0)
    far = links.nic * hosts / (hosts - 1) if hosts > 1 else math.inf
    return _tree_bus(protocol, 0.92 * min(near, far), column, caps) / 2


def _ring_bus(protocol: Protocol, bus: float, column: int, caps: Caps) -> float:
    if protocol == "LL":
        return min(caps.ll[column], bus / 2)
    if protocol == "LL128":
        return min(0.92 * bus, caps.channels * caps.ring_ll128)
    return bus


def _tree_bus(protocol: Protocol, bus: float, column: int, caps: Caps) -> float:
    if protocol == "LL":
        return min(bus / 3.8, caps.ll[column])
    if protocol == "LL128":
        return min(bus * (7 / 9 if column == 0 else 120 / 128), caps.channels * caps.tree_ll128[column])
    return bus


def _check(nbytes: float, num_hosts: int, per_host: int, generation: str) -> None:
    if not 0 <= nbytes < math.inf:
        raise ValueError(f"nbytes must be a number of bytes, 0 or more, got {nbytes!r}")
    for name, value in (("num_hosts", num_hosts), ("per_host", per_host)):
        if value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    if generation not in CAPS:
        raise ValueError(f"generation must be one of {', '.join(CAPS)}, got {generation!r}")
