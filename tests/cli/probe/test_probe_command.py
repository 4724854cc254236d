"""`gradsync probe`: bad input gets a sentence before anything is measured; a cluster file comes of it."""

from __future__ import annotations

import json
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from gradsync.cli import local_ranks
from gradsync.cli.main import main
from gradsync.cli.probe.text import sentences, tables
from gradsync.cluster import Cluster, CodecSpeed, Device, Link
from gradsync.launch.spawn import RankPool
from gradsync.probe.fit import Fit, TimedMessage, fit
from gradsync.probe.measure import ProbeFindings
from netlab.fixture import MakeLab


def test_two_ranks_of_this_machine_make_a_cluster_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, warm: ForkServerContext
) -> None:
    monkeypatch.setattr(local_ranks, "RankPool", partial(RankPool, context=warm))
    path = tmp_path / "cluster.toml"
    assert main(["probe", "--brief", "--json", "--out", str(path)]) == 0
    told = json.loads(capsys.readouterr().out)
    cluster = Cluster.load(path)
    assert cluster.hosts == ((0, 1),)
    assert cluster.calibrated
    assert set(told) == {"command", "file", "cluster", "tiers", "median_error", "worst_error", "warnings"}
    assert told["file"] == str(path)
    assert told["cluster"] == json.loads(json.dumps(cluster.canonical()))
    assert set(told["tiers"]["inside"]["points"][0]) == {"nbytes", "seconds", "fitted_s", "checks", "error"}


def test_under_a_launcher_the_shaped_link_between_hosts_is_found(tmp_path: Path, lab: MakeLab) -> None:
    """100 Mbit/s with headers are 95.6 Mbit/s of data: 1448 bytes in a packet of 1514."""
    path = tmp_path / "cluster.toml"
    assert lab(rate="100mbit").spawn(main, 1, ["probe", "--brief", "--out", str(path)]) == [0, 0]
    cluster = Cluster.load(path)
    assert cluster.hosts == ((0,), (1,))
    assert 8 * 1e6 / cluster.across.seconds(1e6) == pytest.approx(95.6e6, rel=0.15)
    assert cluster.memory is None


def test_an_old_cluster_file_may_be_replaced_but_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("algorithm = 'ring'\n")
    assert main(["probe", "--out", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"gradsync probe: --out {path} exists and is no cluster file (")
    assert said.count("\n") == 1
    assert path.read_text() == "algorithm = 'ring'\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--out", "nowhere/cluster.toml"], "; name a file in a folder that exists"),
        (["--out", "/proc/cluster.toml"], "; name a file in a folder that exists"),
        (["--out", "."], "; name a file in a folder that exists"),
        (["--ranks", "1"], "needs a whole number from 2 to 64, got '1'"),
        (["--ranks", "many"], "needs a whole number from 2 to 64, got 'many'"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_bad_input_is_a_sentence(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["probe", *arguments]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert sentence in said.err


def test_ranks_are_the_launchers_business(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    environment = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["probe", "--ranks", "3"]) == 2
    assert "--ranks 3, but torchrun started 2: leave --ranks out" in capsys.readouterr().err


def test_one_rank_of_a_launcher_has_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["probe", "--out", str(tmp_path / "cluster.toml")]) == 2
    assert "one rank has no links" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    findings = findings_of(Link(100e-6, 12.5e6), 0.0)
    monkeypatch.setattr("gradsync.cli.probe.command.measure_alone", lambda *args, **options: findings)
    assert main(["probe", "--out", "/dev/full"]) == 2
    assert "--out /dev/full cannot be written: No space left" in capsys.readouterr().err


def findings_of(wire: Link, off: float) -> ProbeFindings:
    """As if messages kept back took longer than the link says, by so much."""
    sizes = [64, 1024, 65536, 1 << 20]
    samples = [TimedMessage(nbytes, wire.seconds(nbytes)) for nbytes in sizes]
    checks = [TimedMessage(nbytes, wire.seconds(nbytes) * (1 + off), checks=True) for nbytes in (4096, 1 << 19)]
    found: Fit = fit([*samples, *checks])
    device = Device(codecs=(CodecSpeed("int8", 1e-9, 1e-10), CodecSpeed("powersgd", 1e-9, 1e-9, 1e-9)))
    cluster = Cluster(((0,), (1,)), wire, found.link, device=device)
    return ProbeFindings(cluster, {"across": found}, ("host b ↔ host c: 1.1 Gbit/s, the others have 9.4 Gbit/s",))


@pytest.mark.parametrize(("off", "how"), [(0.0, "it fits well"), (0.1, "it fits fairly"), (1.0, "it fits BADLY")])
def test_it_says_how_well_the_model_fits_and_what_looked_wrong(off: float, how: str) -> None:
    findings = findings_of(Link(100e-6, 12.5e6), off)
    told = sentences(findings, Path("cluster.toml"))
    assert sum(how in sentence for sentence in told) == 1
    assert "LOOK AT THIS: host b ↔ host c: 1.1 Gbit/s, the others have 9.4 Gbit/s." in told
    assert "across: latency 100 µs, large messages 100 Mbit/s = 12.5 MB/s; keeps 0 % of a core busy meanwhile." in told
    assert "gradsync plan --cluster cluster.toml" in told[-1]
    assert [table.row_count for table in tables(findings)] == [6, 2]
