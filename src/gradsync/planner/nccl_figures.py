"""NCCL's constants (2.30, graph/tuning.cc): microseconds per hop, and the most that each GPU generation reaches."""

from __future__ import annotations

from typing import Literal, NamedTuple

Generation = Literal["volta", "ampere", "hopper", "blackwell"]
Name = Literal["ring", "tree", "NVLS", "NVLSTree"]
Protocol = Literal["LL", "LL128", "Simple"]


class Caps(NamedTuple):
    """What a generation reaches at most, in GB/s, on one, two and more hosts; all but `ll` per channel."""

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
