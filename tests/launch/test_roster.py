"""Interfaces, and what follows from who sits where."""

from __future__ import annotations

import socket

import pytest

from gradsync.launch import choose_backend
from gradsync.launch.choose_backend import default_backend
from gradsync.launch.interface import endpoint_towards, interface_addresses, loopback_endpoint, named_endpoint
from gradsync.launch.roster import RankPlacement, RankRecord, announcement, refusal


def test_every_interface_with_an_ipv4_address_is_known() -> None:
    known = interface_addresses()
    assert {name for name, _ in known} <= {name for _, name in socket.if_nameindex()}
    assert ("lo", "127.0.0.1") in known


def test_endpoint_is_the_interface_that_routes_there() -> None:
    for remote in ("127.0.0.1", "127.0.1.1", "localhost"):
        endpoint = endpoint_towards(remote)
        assert (endpoint.interface, endpoint.loopback) == ("lo", True)
    for name, address in interface_addresses():
        if ":" not in address and name != "lo":
            # Packets to oneself go through loopback, but from the interface's own address.
            assert (endpoint_towards(address).interface, endpoint_towards(address).address) == (name, address)


def test_named_interface_must_exist_and_loopback_in_a_list_counts() -> None:
    assert named_endpoint("lo") == loopback_endpoint()
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME=lo,eth77 names 'eth77'.*lo \(127\.0\.0\.1\)"):
        named_endpoint("lo,eth77")


def peer(network: str, host: str = "k", backend: str | None = None) -> RankRecord:
    return RankRecord(hostname="vm", host=host, network=network, towards_master=None, backend=backend)


def placement(address: str, gpu: str | None = None, problem: str | None = None) -> RankPlacement:
    return RankPlacement("lo" if address.startswith("127.") else "eth0", address, gpu, problem)


def test_loopback_is_refused_across_networks_only() -> None:
    placements = [placement("10.0.0.1"), placement("127.0.0.1")]
    assert refusal([peer("a"), peer("a")], placements) is None
    sentence = refusal([peer("a"), peer("b")], placements)
    assert sentence is not None
    assert sentence.startswith("rank 1 on host vm would use gloo on lo (127.0.0.1), which is loopback")
    assert "GLOO_SOCKET_IFNAME" in sentence


def test_declared_hosts_on_one_network_may_use_loopback() -> None:
    peers = [peer("a", host="declared:x"), peer("a", host="declared:y")]
    placements = [placement("127.0.0.1"), placement("127.0.0.1")]
    assert refusal(peers, placements) is None
    assert (
        announcement(0, peers, placements, "gloo")
        == "gradsync: host x: rank 0 of 2, gloo on lo (127.0.0.1), backend gloo"
    )
    assert (
        announcement(1, peers, placements, "gloo")
        == "gradsync: host y: rank 1 of 2, gloo on lo (127.0.0.1), backend gloo"
    )


def test_first_rank_of_each_host_speaks() -> None:
    peers = [peer(network) for network in "aabba"]
    placements = [placement(f"10.0.0.{rank}") for rank in range(5)]
    lines = [announcement(rank, peers, placements, "gloo") for rank in range(5)]
    assert [line is not None for line in lines] == [True, False, True, False, False]
    assert lines[0] == "gradsync: host vm: ranks 0-1,4 of 5, gloo on eth0 (10.0.0.0), backend gloo"


@pytest.mark.parametrize(
    ("peers", "placements", "sentence"),
    [
        ([peer("a"), peer("a", backend="gloo")], [placement("127.0.0.1")] * 2, "rank 0 with None, rank 1 with 'gloo'"),
        (
            [peer("a")] * 2,
            [placement("127.0.0.1"), placement("127.0.0.1", problem="no.")],
            "rank 1 on host vm cannot take part: no.",
        ),
        ([peer("a", backend="nccl")] * 2, [placement("127.0.0.1", gpu="g")] * 2, "ranks 0 and 1 share g"),
        (
            [peer("a", backend="nccl")] * 2,
            [placement("127.0.0.1", gpu="g"), placement("127.0.0.1")],
            "rank 1 on host vm has none",
        ),
    ],
)
def test_roster_is_refused_with_a_sentence(
    peers: list[RankRecord], placements: list[RankPlacement], sentence: str
) -> None:
    assert sentence in (refusal(peers, placements) or "")


def test_backend_follows_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_backend, "nccl_lack", lambda: None)
    assert default_backend([None, None]) == ("gloo", None)
    assert default_backend(["a", "b"]) == ("cpu:gloo,cuda:nccl", None)
    assert default_backend(["a", None])[0] == "gloo"
    backend, note = default_backend(["a", "b", "a"])
    assert backend == "cpu:gloo,cuda:gloo"
    assert note is not None
    assert "ranks 0 and 2 share a GPU" in note
