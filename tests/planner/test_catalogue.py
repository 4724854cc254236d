"""The catalogue's parts are what their names say, and a cluster of them could stand in a room."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync import units
from gradsync.cluster import Cluster
from gradsync.planner import catalogue
from gradsync.planner.catalogue import DEVICES, LINKS, NETWORKS, cluster, device, link, network
from gradsync.planner.catalogue.devices import processor

PAGE = (Path(__file__).parent.parent.parent / "docs" / "links.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*LINKS, *NETWORKS])
def test_no_link_is_faster_than_its_wire_unless_switches_add(name: str) -> None:
    wire = {**LINKS, **NETWORKS}[name]
    assert wire.source
    if wire.line_rate and not name.endswith("-sharp"):
        assert 0 < wire.link.bandwidth < wire.line_rate


def test_100g_is_rdma_and_tcp_must_be_said() -> None:
    assert network("100g") == network("100g-rdma") == network("100gbit")
    assert network("100g").bandwidth == pytest.approx(0.88 * 12.5e9)
    assert network("100g-tcp").bandwidth == pytest.approx(41e9 / 8)
    assert network("100g-tcp").latency_s > network("100g").latency_s


def test_slow_ethernet_is_tcp() -> None:
    assert network("10g") == network("10g-tcp") != network("10g-rdma")
    assert network("1g").bandwidth == pytest.approx(0.95 * 125e6)


def test_bits_are_a_line_rate_and_bytes_are_what_arrives() -> None:
    assert network("100gbit").bandwidth < 12.5e9
    assert network("12.5GB/s").bandwidth == 12.5e9
    assert network("12.5GB/s-tcp").bandwidth == 12.5e9
    assert network("12.5GB/s-tcp").latency_s == network("100g-tcp").latency_s
    assert link("300GB/s").bandwidth == 300e9


def test_at_home_the_way_up_counts() -> None:
    assert network("home-100m/20m").bandwidth == pytest.approx(0.95 * 2.5e6)
    assert network("home-20m/100m") == network("home-100m/20m")
    assert network("home-300m/40m").bandwidth == pytest.approx(0.95 * 5e6)


@given(gbits=st.floats(1e-3, 1e4))
def test_any_rate_is_a_network(gbits: float) -> None:
    made = network(f"{gbits:f}gbit")
    assert 0 < made.bandwidth <= gbits * 0.96e9 / 8
    assert network(f"{gbits:f}g-tcp").bandwidth <= max(41e9 / 8, made.bandwidth)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("ndrr", "there is no network 'ndrr' in the catalogue, did you mean ndr"),
        ("100g-tpc", "did you mean 100g-tcp"),
        ("infiniband", "it has 1g, 2.5g, 10g, 25g, 40g, 50g, 100g,"),
        ("infiniband", "and any rate: 40gbit (line rate) or 3.2GB/s (what arrives)"),
        ("nvlink3", "'nvlink3' is a link inside a host, not a network: take one of 1g,"),
        ("100", "'100' is no rate, for it has no unit: write 100g or 100gbit (networks are sold in bits:"),
        ("0gbit", "nothing would ever arrive at zero"),
        ("-5g", "negative"),
        ("home-100m", "there is no network 'home-100m'"),
        ("home-fast/20m", "'fast' is no rate"),
        ("", "'' is no rate"),
        (None, "None is no rate"),
        (["100g"], "is no rate"),
        ("x" * 10_000, "xxx... in the catalogue"),
    ],
)
def test_an_unknown_network_is_told_the_near_names_and_all_names(name: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        network(name)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_link_is_told_the_near_names_and_all_names() -> None:
    with pytest.raises(ValueError, match="no link inside a host 'nvlink' in the catalogue, did you mean nvlink"):
        link("nvlink")
    with pytest.raises(ValueError, match="'ndr' is a network, not a link inside a host: take one of nvlink2"):
        link("ndr")


@pytest.mark.parametrize("name", ["h10", "h100x", "H 100", "gtx", "", None, 3, ["a100"], "b" * 9999])
def test_an_unknown_device_is_told_all_names(name: Any) -> None:
    with pytest.raises(ValueError) as caught:
        device(name)
    assert "there is no device" in str(caught.value)
    assert ", ".join(DEVICES) in str(caught.value)


def test_near_names_of_a_device_are_named() -> None:
    with pytest.raises(ValueError, match=r"did you mean h100 or v100 or h200[?]"):
        device("h100x")
    assert device("H100") == device("h100")


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_is_sold_with_a_link_that_there_is(name: str) -> None:
    assert processor(name).link in LINKS
    assert device(name).name == name
    assert cluster(16, 8, network="100g", device=name).device == device(name)


def test_a_cluster_is_made_of_its_parts() -> None:
    made = cluster(gpus=32, per_host=8, link="nvlink3", network="100g", nics=1, device="a100")
    assert made == dataclasses.replace(cluster(32, network="100g"))
    assert made.hosts[1] == tuple(range(8, 16))
    assert (made.inside, made.across, made.device) == (link("nvlink3"), network("100g"), device("a100"))
    assert (made.backend, made.shared_nic, made.calibrated, made.memory) == ("nccl", True, False, None)


def test_nics_are_shared_unless_every_rank_has_one() -> None:
    one, four, eight = (cluster(16, 8, network="100g", nics=nics) for nics in (1, 4, 8))
    assert (one.shared_nic, four.shared_nic, eight.shared_nic) == (True, True, False)
    assert four.across.bandwidth == pytest.approx(4 * one.across.bandwidth)
    assert eight.across.bandwidth == one.across.bandwidth
    assert not cluster(2, 1, network="100g").shared_nic


def test_one_host_needs_no_network() -> None:
    assert len(cluster(8).hosts) == 1
    assert cluster(4).hosts == ((0, 1, 2, 3),)


def test_cpus_talk_over_gloo_and_share_memory() -> None:
    made = cluster(4, 2, network="10g", device="cpu")
    assert made.backend == "gloo"
    assert made.memory == link("memory")
    assert made.inside == link("loopback")
    assert cluster(2, link="loopback", device="cpu").memory is None


def test_gloo_moves_no_more_than_a_core_can() -> None:
    alone = cluster(2, 1, network="100g", device="cpu")
    shared = cluster(8, 4, network="100g", device="cpu")
    slow = cluster(2, 1, network="1g", device="cpu")
    assert alone.across.bandwidth == 1.07e9
    assert shared.across.bandwidth == pytest.approx(4 * 1.07e9)
    assert alone.across.load == shared.across.load == 1
    assert slow.across.bandwidth == network("1g").bandwidth
    assert slow.across.load == pytest.approx(network("1g").bandwidth / 1.07e9)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"gpus": 0}, "a cluster has from 1 to 1,000,000 GPUs, got 0"),
        ({"gpus": -8}, "got -8"),
        ({"gpus": 10**9}, "got 1000000000"),
        ({"gpus": 8.0}, "got 8.0"),
        ({"gpus": True}, "got True"),
        ({"gpus": 30, "per_host": 8}, "30 GPUs do not fill hosts of 8: 24 or 32 would"),
        ({"gpus": 4, "per_host": 8}, "8 GPUs per host are more than the 4 in all: take at most 4 per host"),
        ({"gpus": 4, "per_host": 0}, "a host has a whole number of GPUs, at least 1, got 0"),
        ({"gpus": 16, "network": None}, "2 hosts need a network between them: 100g, 100g-tcp, ndr ..."),
        ({"nics": 0}, "a host has a whole number of NICs, at least 1, got 0"),
        ({"nics": 16}, "16 NICs are more than the 8 ranks of a host can use: take at most 8"),
        ({"device": "cpu", "backend": "nccl"}, "nccl moves data between GPUs, and the device is a cpu: take backend"),
        ({"device": "cpu", "link": "nvlink3"}, "nvlink3 links GPUs, and the device is a cpu: take memory or loopback"),
        ({"link": "loopback"}, "loopback is how gloo's ranks reach each other, NCCL takes nvlink3"),
        ({"link": ["nvlink3"]}, "is no rate"),
        ({"backend": "mpi"}, 'backend must be "gloo" or "nccl", got \'mpi\''),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        cluster(**{"gpus": 32, "network": "100g", **arguments})
    assert sentence in str(caught.value)


def test_a_hundred_thousand_gpus_are_a_cluster_and_fit_into_a_small_file(tmp_path: Path) -> None:
    made = cluster(100_000, 8, network="400g", nics=8, device="h100")
    made.save(tmp_path / "cluster.toml")
    assert made.world_size == 100_000
    assert (tmp_path / "cluster.toml").stat().st_size < 2000
    assert Cluster.load(tmp_path / "cluster.toml") == made


def _rows(heading: str) -> dict[str, list[str]]:
    """The rows of the table under a heading of the page, by each name in their first cell."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:3] == "| `"]
    return {name: row[1:] for row in rows for name in re.findall(r"`([^`]+)`", row[0])}


@pytest.mark.parametrize(("heading", "parts"), [("Links inside a host", LINKS), ("Networks", NETWORKS)])
def test_the_page_shows_the_links_of_the_catalogue(heading: str, parts: dict[str, catalogue.Wire]) -> None:
    rows = _rows(heading)
    assert list(rows) == sorted(parts, key=list(rows).index)
    for name, wire in parts.items():
        line = units.show_rate(wire.line_rate) if wire.line_rate else "–"
        shown = [units.show_seconds(wire.link.latency_s), units.show_rate(wire.link.bandwidth), line, wire.source]
        assert rows[name] == shown


def test_the_page_shows_the_devices_of_the_catalogue() -> None:
    rows = _rows("Devices")
    assert list(rows) == list(DEVICES)
    for name, (made, usual, source) in DEVICES.items():
        flops = f"{made.flops / 1e12:g} TFLOP/s" if made.flops else "–"
        memory = units.show_nbytes(made.memory_nbytes) if made.memory_nbytes else "–"
        assert rows[name] == [flops, memory, units.show_rate(made.memory_bandwidth), f"`{usual}`", source]
