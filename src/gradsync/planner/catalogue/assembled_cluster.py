"""A cluster of parts of the catalogue; what could not stand in a room is refused."""

from __future__ import annotations

from dataclasses import replace

from gradsync.cluster import Backend, Cluster, Hosts, Link
from gradsync.planner.catalogue.devices import Processor, processor
from gradsync.planner.catalogue.networks import LINKS, CatalogueLink, wire

_MOST_GPUS = 1_000_000
_BOX = 8  # GPUs in a host, unless said otherwise

# What one core moves with gloo (gloo issue 248: 1.07 GB/s on 40 Gbit/s Ethernet).
_GLOO_CORE = 1.07e9

_GLOO_LINKS = ("loopback", "memory")


def cluster(
    gpus: int = 32,
    per_host: int | None = None,
    link: str | None = None,
    network: str | None = None,
    nics: int = 1,
    device: str = "a100",
    backend: Backend | None = None,
) -> Cluster:
    """Hosts of equal devices, linked inside by `link` and with each other by `network`.

    Args:
        gpus: How many in all (ranks, if the device is a cpu).
        per_host: How many in each host. None: 8, or all if there are fewer.
        link: Inside a host: nvlink3, pcie4, loopback ... or a rate. None: what hosts with this device usually have.
        network: Between hosts: 100g, 100g-tcp, ndr ... or a rate, of each NIC. Needed if there are several hosts.
        nics: How many of a host: 1 is shared by all its ranks, as many as ranks are one for each.
        device: a100, h100 ... cpu.
        backend: None: "nccl" for GPUs, "gloo" for CPUs.

    >>> made = cluster(gpus=32, per_host=8, link="nvlink3", network="100g", device="a100")
    >>> made.name, len(made.hosts), made.across.bandwidth, made.shared_nic
    ('32 x a100, 8 per host, nvlink3, 100g', 4, 11000000000.0, True)
    """
    hosts = _hosts(gpus, per_host)
    per_host = len(hosts[0])
    chosen = processor(device)
    kind = chosen.device.kind
    if backend is None:
        backend = "nccl" if kind == "gpu" else "gloo"
    if backend == "nccl" and kind == "cpu":
        raise ValueError("nccl moves data between GPUs, and the device is a cpu: take backend gloo")
    _check_nics(nics, per_host)
    link_name = _link_name(link, chosen, backend)
    inside = wire("loopback" if link_name == "memory" else link_name, "inside").link
    across = _across(hosts, network, nics, backend) or inside
    words = [f"{gpus} x {chosen.device.name}", f"{per_host} per host", link_name]
    if len(hosts) > 1:
        words.append(f"{nics} x {network}" if nics > 1 else str(network))
    return Cluster(
        hosts,
        inside=inside,
        across=across,
        shared_nic=nics < per_host,
        memory=LINKS["memory"].link if link_name == "memory" else None,
        backend=backend,
        device=chosen.device,
        name=", ".join(words),
    )


def _hosts(gpus: int, per_host: int | None) -> Hosts:
    if type(gpus) is not int or not 1 <= gpus <= _MOST_GPUS:
        raise ValueError(f"a cluster has from 1 to {_MOST_GPUS:,} GPUs, got {gpus!r}")
    if per_host is None:
        per_host = min(_BOX, gpus)
    if type(per_host) is not int or per_host < 1:
        raise ValueError(f"a host has a whole number of GPUs, at least 1, got {per_host!r}")
    if per_host > gpus:
        raise ValueError(f"{per_host} GPUs per host are more than the {gpus} in all: take at most {gpus} per host")
    if gpus % per_host:
        less = gpus - gpus % per_host
        raise ValueError(f"{gpus} GPUs do not fill hosts of {per_host}: {less} or {less + per_host} would")
    return tuple(tuple(range(first, first + per_host)) for first in range(0, gpus, per_host))


def _check_nics(nics: int, per_host: int) -> None:
    if type(nics) is not int or nics < 1:
        raise ValueError(f"a host has a whole number of NICs, at least 1, got {nics!r}")
    if nics > per_host:
        raise ValueError(
            f"{nics} NICs are more than the {per_host} ranks of a host can use: take at most {per_host}, "
            "or name the rate of all together"
        )


def _link_name(link: str | None, chosen: Processor, backend: Backend) -> str:
    kind = chosen.device.kind
    if link is None:
        return "loopback" if kind == "gpu" and backend == "gloo" else chosen.link
    name = link.strip().lower() if isinstance(link, str) else ""
    if name in _GLOO_LINKS and backend == "nccl":
        raise ValueError(f"{name} is how gloo's ranks reach each other, NCCL takes {chosen.link}: leave the link out")
    if name in LINKS and name not in _GLOO_LINKS and kind == "cpu":
        raise ValueError(f"{name} links GPUs, and the device is a cpu: take memory or loopback")
    return name if name in LINKS else link


def _across(hosts: Hosts, network: str | None, nics: int, backend: Backend) -> Link | None:
    """One rank's link to other hosts, or all ranks' of a host if they share it."""
    if network is None:
        if len(hosts) > 1:
            raise ValueError(
                f"{len(hosts)} hosts need a network between them: 100g, 100g-tcp, ndr ... or a rate such as 40gbit"
            )
        return None
    made: CatalogueLink = wire(network, "across")
    per_host = len(hosts[0])
    shared = nics < per_host
    whole = replace(made.link, bandwidth=made.link.bandwidth * (nics if shared else 1))
    return _with_gloo(whole, per_host if shared else 1) if backend == "gloo" else whole


def _with_gloo(across: Link, ranks: int) -> Link:
    """Gloo's ranks spend a core each on moving bytes, and move no more than that core can."""
    bandwidth = min(across.bandwidth, ranks * _GLOO_CORE)
    return replace(across, bandwidth=bandwidth, load=bandwidth / (ranks * _GLOO_CORE))
