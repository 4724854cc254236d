"""A lab's hosts are apart, its links are slow, and gradsync runs on it."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from netlab import lab as lab_module
from netlab import main as script
from netlab.fixture import MakeLab
from netlab.lab import Lab, RankFailed, available, payload
from netlab.lab_plays import reduce_ones, train
from netlab.reach import (
    fail_on,
    greet_all,
    interfaces,
    knock_at_loopback,
    namespaces,
    torchrun_says,
)
from netlab.wiring import Shaper, bits_per_second


def test_hosts_share_nothing_but_files_and_ranks_of_a_host_share_all(lab: MakeLab) -> None:
    seen = lab().spawn(namespaces, [2, 1])
    assert seen[0] == seen[1]
    here = namespaces()
    for a, b in itertools.combinations([here, seen[0], seen[2]], 2):
        assert not a.items() & b.items()


def test_hosts_that_share_processes_have_a_network_of_their_own(lab: MakeLab) -> None:
    two = lab(share_processes=True)
    seen, here = two.spawn(namespaces, [2, 1]), namespaces()
    assert seen[0] == seen[1]
    for a, b in itertools.combinations([here, seen[0], seen[2]], 2):
        assert {kind for kind in a if a[kind] == b[kind]} == {"pid", "shm"}
    hosts, weights, _ = zip(*two.spawn(train, [2, 1], 1), strict=True)
    assert hosts[0] == hosts[1] != hosts[2]  # to gradsync too
    assert weights[1:] == weights[:-1]


def test_a_host_sees_its_own_link_only(lab: MakeLab) -> None:
    assert lab().spawn(interfaces) == [["lo", "eth0"]] * 2


def test_loopback_of_another_host_is_out_of_reach(lab: MakeLab) -> None:
    two = lab()
    assert two.spawn(knock_at_loopback, [2, 0]) == ["reached"] * 2
    assert two.spawn(knock_at_loopback, [1, 1]) == ["refused"] * 2


def test_three_hosts_reach_each_other_over_the_switch(lab: MakeLab) -> None:
    assert lab(hosts=3).spawn(greet_all) == [["host1", "host2"], ["host0", "host2"], ["host0", "host1"]]


def test_a_rank_is_told_what_torchrun_would_tell_it(lab: MakeLab) -> None:
    told = lab().spawn(torchrun_says, [2, 1])
    shared = {"WORLD_SIZE": "3", "MASTER_ADDR": "10.0.0.1", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    rank_places = [("0", "0", "2", "0", "host0"), ("1", "1", "2", "0", "host0"), ("2", "0", "1", "1", "host1")]
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "hostname")
    assert told == [shared | dict(zip(names, place, strict=True)) for place in rank_places]
    with Lab() as without_fork_server:
        assert without_fork_server.spawn(torchrun_says, [2, 1]) == told


def test_an_all_reduce_sends_its_bytes_over_the_shaped_link(lab: MakeLab) -> None:
    """Two ranks of a ring send each element once; the bytes are there, and the shaper made some of them wait."""
    two, numel = lab(rate="100mbit"), 500_000
    assert two.spawn(reduce_ones, 1, numel) == [2.0 * numel] * 2
    for sent in two.counters():
        assert 4 * numel <= payload(*sent) <= 1.1 * 4 * numel
    assert min(two.times_held()) > 0


def test_an_unshaped_lab_holds_nothing_back(lab: MakeLab) -> None:
    three = lab(hosts=3, rate=None)
    three.spawn(greet_all)
    assert three.times_held() == [0, 0, 0]
    assert min(sent.packets for sent in three.counters()) > 0


def test_gradsync_keeps_replicas_equal_over_two_hosts_of_two_ranks(lab: MakeLab) -> None:
    hosts, weights, moved = zip(*lab().spawn(train, [2, 2], 3), strict=True)
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]  # gradsync knows which ranks share a host
    assert weights[1:] == weights[:-1]
    assert min(moved) > 0


def test_a_failure_shows_every_ranks_output(lab: MakeLab) -> None:
    with pytest.raises(RankFailed, match=r"1 of 3 ranks failed: \[1\]") as failure:
        lab().spawn(fail_on, [2, 1], 1)
    assert "ArithmeticError: two and two is five" in str(failure.value)
    assert all(f"rank {rank} was here" in str(failure.value) for rank in range(3))


def test_a_failure_can_be_looked_at_instead(lab: MakeLab) -> None:
    command = ["sh", "-c", "echo $RANK; test $RANK = 0 || kill -9 $$"]
    assert [each[2:] for each in lab().run(command, check=False)] == [(0, "0\n"), (-9, "1\n")]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"hosts": 1}, "from 2 to 64 hosts, got 1"),
        ({"rate": "fast"}, "such as '100mbit' or a number of bits/s, got 'fast'"),
        ({"rate": "1gbyte"}, "got '1gbyte'"),
        ({"burst": 1}, "burst must be a number of bytes"),
    ],
)
def test_wrong_settings_are_a_sentence(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Lab(**settings)  # type: ignore[arg-type]


def test_what_is_missing_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_module, "missing_capabilities", lambda: ["CAP_FLY"])
    assert available.__wrapped__() == "making network namespaces needs root (CAP_FLY)"


def test_ranks_are_named_for_every_host() -> None:
    with pytest.raises(ValueError, match=r"a number for each of 2 hosts, .* got \[1\]"):
        Lab().run(["true"], [1])


def test_rates_are_read_as_tc_writes_them() -> None:
    assert [bits_per_second(rate) for rate in ("100mbit", "2.5gbit", 64000)] == [10**8, 25 * 10**8, 64000]
    assert Shaper.of("100mbit") == Shaper(10**8, burst=131072, queue=1250000)


def test_headers_are_not_payload() -> None:
    assert payload(1514, 1) == 1448


def test_the_script_prefixes_output_and_counts_bytes(lab: MakeLab) -> None:
    start = [sys.executable, script.__file__, "--ranks", "2", "--"]
    command = ["sh", "-c", "echo $LOCAL_RANK of $LOCAL_WORLD_SIZE"]
    done = subprocess.run(start + command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    lines = [f"[host{host} rank {2 * host + local}] {local} of 2" for host in range(2) for local in range(2)]
    assert sorted(said[:4]) == lines
    assert said[4].startswith("host0 sent 0.00 MB")


@pytest.mark.parametrize("arguments", [[], ["--rate", "fast", "--", "true"], ["--hosts", "two", "--", "true"]])
def test_the_script_answers_bad_input_with_a_sentence(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        script.main(arguments)
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
