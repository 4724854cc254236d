"""Links inside a host and networks, by name or by rate; pure.

Two kinds of figure must not be mixed up. The line rate is what the vendor prints on the box. The bandwidth is what an
all-reduce gets out of it, and only that is priced. So a rate in bits (40gbit) counts as a line rate of which a part
arrives; a rate in bytes (3.2GB/s) counts as what was seen to arrive, and stays as it is.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal, NamedTuple

from gradsync import units
from gradsync.cluster import Link
from gradsync.planner.catalogue.naming import unknown

Tier = Literal["inside", "across"]
_RATE = re.compile(r"[-+.0-9](?:[^-]|e-)*(?:-rdma|-tcp)?", re.DOTALL)  # what begins like a number
_OVER = re.compile(r"-(rdma|tcp)(?=\s*$)", re.IGNORECASE)

# NCCL's hop latencies (tuning.cc, ring, Simple protocol), in seconds.
_NVLINK_S, _PCIE_S, _NET_S = 3.4e-6, 5.7e-6, 14e-6
_TCP_S = 50e-6  # an assumption: the kernel's 10 to 30 µs each way, and a thread that must wake up
_HOME_S = 20e-3  # an assumption

_RDMA_SHARE = 0.88
_TCP_SHARE = 0.95  # what headers of packets of 1500 bytes leave
_TCP_MOST = 41e9 / 8
_RDMA_FROM = 25e9 / 8  # a bare rate below this means TCP

_GPU_LOAD = 0.05  # an assumption: computation beside NCCL's kernels is slower by 2 to 10 %

_HDR_SOURCE = "88 % of line rate, between 91 % (nccl-tests issue 100) and 85 % (issue 119)"
_RDMA_SOURCE = "88 % of line rate, as HDR; 8 x 100G RoCE reached 75 % (nccl issue 495)"
_NDR_SOURCE = "88 % of line rate, as HDR; 8 NICs of the 400G class reached 74 % (ml-engineering)"
_TCP_SOURCE = "95 % of line rate, which packets of 1500 bytes leave"
_FAST_TCP_SOURCE = "95 % of line rate, at most 41 Gbit/s (nccl issue 209: NCCL on 100 Gbit/s, EC2)"


class CatalogueLink(NamedTuple):
    """A link and where its figures are from."""

    link: Link
    line_rate: float  # bytes per second on the box; 0: there is no such figure
    source: str


def _fast(latency_s: float, bandwidth: float, line_rate: float, source: str) -> CatalogueLink:
    return CatalogueLink(Link(latency_s, bandwidth, load=_GPU_LOAD, spread=0.1), line_rate, source)


def _rdma(line_rate: float, source: str = _RDMA_SOURCE) -> CatalogueLink:
    return CatalogueLink(Link(_NET_S, _RDMA_SHARE * line_rate, load=_GPU_LOAD, spread=0.15), line_rate, source)


def _tcp(line_rate: float) -> CatalogueLink:
    if line_rate < _RDMA_FROM:
        return CatalogueLink(Link(_TCP_S, _TCP_SHARE * line_rate, load=_GPU_LOAD, spread=0.15), line_rate, _TCP_SOURCE)
    # NCCL reached 10.7 to 41 Gbit/s on one and the same network: the spread is wide.
    bandwidth = min(_TCP_SHARE * line_rate, _TCP_MOST)
    return CatalogueLink(Link(_TCP_S, bandwidth, load=_GPU_LOAD, spread=0.4), line_rate, _FAST_TCP_SOURCE)


def _home(down: float, up: float) -> CatalogueLink:
    source = "95 % of the slower way, which is the way up as a rule; 20 ms are an assumption"
    slower = min(down, up)
    return CatalogueLink(Link(_HOME_S, _TCP_SHARE * slower, load=0.0, spread=0.3), slower, source)


LINKS: dict[str, CatalogueLink] = {
    "nvlink2": _fast(_NVLINK_S, 120e9, 150e9, "6 links x 20 GB/s, NCCL's own figure"),
    "nvlink3": _fast(
        _NVLINK_S,
        230e9,
        300e9,
        "8 x A100: 235 GB/s bus bandwidth measured (ml-engineering), 200 (nccl-tests issue 149)",
    ),
    "nvlink4": _fast(
        _NVLINK_S,
        370e9,
        450e9,
        "8 x H100: 370 GB/s with a ring (NVIDIA in nccl-tests issue 212); H200 368 (ml-engineering)",
    ),
    "nvlink4-sharp": _fast(
        _NVLINK_S, 480e9, 450e9, "8 x H100: 480 GB/s, the switch adds (nccl-tests issue 212); H200 475 (issue 272)"
    ),
    "nvlink5": _fast(_NVLINK_S, 720e9, 900e9, "18 links x 40.1 GB/s, NCCL's own figure, not measured"),
    "pcie3": _fast(_PCIE_S, 12e9, 15.75e9, "NCCL's own figure for 16 lanes"),
    "pcie4": _fast(_PCIE_S, 24e9, 31.5e9, "NCCL's own figure for 16 lanes"),
    "pcie5": _fast(_PCIE_S, 48e9, 63e9, "NCCL's own figure for 16 lanes"),
    "loopback": CatalogueLink(
        Link(0.9e-3, 0.8e9, load=1.0, spread=0.2), 0.0, "gloo, 2 ranks on 2 cores (benchmarks/allreduce)"
    ),
    "memory": CatalogueLink(
        Link(13e-6, 21.5e9, load=1.0, spread=0.2),
        0.0,
        "gradsync's shared memory, 2 ranks on 2 cores (benchmarks/allreduce)",
    ),
}

_ETHERNET = {
    name: units.rate(name) for name in ("1g", "2.5g", "10g", "25g", "40g", "50g", "100g", "200g", "400g", "800g")
}

NETWORKS: dict[str, CatalogueLink] = {
    **{name: _rdma(rate) if rate >= _RDMA_FROM else _tcp(rate) for name, rate in _ETHERNET.items()},
    **{f"{name}-rdma": _rdma(rate) for name, rate in _ETHERNET.items() if rate >= units.rate("10g")},
    **{f"{name}-tcp": _tcp(rate) for name, rate in _ETHERNET.items()},
    "hdr": _rdma(units.rate("200g"), _HDR_SOURCE),
    "ndr": _rdma(units.rate("400g"), _NDR_SOURCE),
    "xdr": _rdma(units.rate("800g"), _NDR_SOURCE),
    "home-100m/20m": _home(units.rate("100m"), units.rate("20m")),
    "home-1g/50m": _home(units.rate("1g"), units.rate("50m")),
    "home-1g/1g": _home(units.rate("1g"), units.rate("1g")),
}


def link(name: str, tier: Tier = "inside") -> Link:
    """A link by its name in the catalogue, or by its rate.

    >>> link("nvlink3").bandwidth, link("12GB/s").bandwidth
    (230000000000.0, 12000000000.0)
    >>> link("100g", "across") == network("100g")
    True
    """
    return wire(name, tier).link


def network(name: str) -> Link:
    """A link between hosts: 100g, 100g-tcp, ndr, home-100m/20m, or any rate.

    >>> network("100g").bandwidth, network("100g-tcp").bandwidth, network("40gbit") == network("40g")
    (11000000000.0, 5125000000.0, True)
    """
    return wire(name, "across").link


def wire(name: str, tier: Tier) -> CatalogueLink:
    """A link by its name or its rate, with its source."""
    here, there = (LINKS, NETWORKS) if tier == "inside" else (NETWORKS, LINKS)
    what = "link inside a host" if tier == "inside" else "network"
    key = name.strip().lower() if isinstance(name, str) else ""
    if key in here:
        return here[key]
    if tier == "across" and (found := re.fullmatch(r"home-([^/]+)/([^/]+)", key)):
        return _home(units.rate(found[1]), units.rate(found[2]))
    if not key or _RATE.fullmatch(key):
        return _by_rate(name, tier)
    if key in there:
        wrong = "a network, not a link inside a host" if tier == "inside" else "a link inside a host, not a network"
        raise ValueError(f"{name!r} is {wrong}: take one of {', '.join(here)}")
    raise ValueError(unknown(what, name, here, ", and any rate: 40gbit (line rate) or 3.2GB/s (what arrives)"))


def _by_rate(text: str, tier: Tier) -> CatalogueLink:
    over = found[0].lower() if isinstance(text, str) and (found := _OVER.search(text)) else ""
    plain = text.strip()[: -len(over)] if over else text
    rate = units.rate(plain)
    if tier == "inside":
        made = _fast(_PCIE_S, _RDMA_SHARE * rate, rate, _RDMA_SOURCE)
    else:
        made = _tcp(rate) if over == "-tcp" or (not over and rate < _RDMA_FROM) else _rdma(rate)
    if "B" in plain and "bit" not in plain.lower():
        made = CatalogueLink(replace(made.link, bandwidth=rate), 0.0, "as it was named")
    return made
