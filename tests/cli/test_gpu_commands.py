"""`--share-gpus`: commands whose ranks are on GPUs, and what they say where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gradsync.cli.main import main
from gradsync.cluster import Cluster

on_gpus = pytest.mark.skipif(not torch.cuda.is_available(), reason="There is no GPU on this machine.")


@pytest.mark.skipif(torch.cuda.is_available(), reason="This machine has a GPU.")
@pytest.mark.parametrize("command", ["bench", "probe", "demo"])
def test_without_a_gpu_they_say_so(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command, "--share-gpus"]) == 2
    sentence = f"gradsync {command}: --share-gpus needs a GPU, and torch sees none here: leave it out\n"
    assert capsys.readouterr() == ("", sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["bench", "--share-gpus", "--algorithms", "ring,any"], "any works in host memory: leave --share-gpus out"),
        (["bench", "--share-gpus", "--algorithms", "mpi"], "mpi works in host memory: leave --share-gpus out"),
        (["bench", "--algorithms", "nccl"], "nccl works on GPUs: add --share-gpus"),
        (["demo", "--share-gpus", "--slow-link", "1gbit"], "--slow-link trains on processors: leave out --share-gpus"),
    ],
)
def test_what_does_not_go_together_is_refused(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"gradsync {arguments[0]}: {sentence}\n"


@on_gpus
def test_bench_adds_up_right_on_gpus(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--ranks", "2", "--sizes", "1K,1M", "--rounds", "2", "--algorithms", "auto,ring"]
    assert main(["bench", "--share-gpus", "--json", *arguments]) == 0
    result = json.loads(capfd.readouterr().out)
    assert [cell["arm"] for cell in result["cells"]] == ["nccl", "auto", "ring"] * 2
    assert not any(cell["wrong"] for cell in result["cells"])
    assert result["machine"]["gpu"] == torch.cuda.get_device_name()


@on_gpus
def test_probe_measures_nccl(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    assert main(["probe", "--share-gpus", "--brief", "--json", "--out", str(path)]) == 0
    assert json.loads(capfd.readouterr().out)
    found = Cluster.load(path)
    assert found.backend == "nccl"
    assert 0 <= found.inside.load <= 1
    assert all(speed.host_s + speed.host_item_s > 0 for speed in found.device.codecs)


@on_gpus
def test_demo_trains_on_gpus(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--share-gpus", "--steps", "12", "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["gradsync_from_ddp"]["identical"]


@on_gpus
def test_demo_kills_a_rank_on_a_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--share-gpus", "--kill", "1", "--json"]) == 0
    ours, _ = json.loads(capfd.readouterr().out)["deaths"]
    assert ours["fates"][0]["names_killed_rank"]
