"""`gradsync doctor` before a run: alone, under a launcher, between hosts; a sentence on bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doctor_plays import see_doctor

from gradsync.cli.doctor.finding import Grade
from gradsync.cli.doctor.measured_links import check_links, measure_links
from gradsync.cli.doctor.rank_facts import Facts
from gradsync.cli.local_ranks import measure_as_rank
from gradsync.cli.main import main
from netlab.fixture import MakeLab


def test_this_machine_is_examined_and_every_finding_that_is_not_ok_has_a_fix(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert main(["doctor", "--ranks", "2", "--brief", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    grades = [each["grade"] for each in told["findings"]]
    assert grades == sorted(grades, key=["wrong", "note", "ok"].index)
    assert all(each["fix"] for each in told["findings"] if each["grade"] != "ok")
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in told["conclusion"]
    assert (told["num_wrong"], told["links"], len(told["ranks"])) == (grades.count("wrong"), [], 1)


def test_ranks_of_one_host_measure_a_ring_and_all_get_the_same(run: Callable[..., list[Any]]) -> None:
    for ranks in (2, 3):
        measured = run(measure_as_rank, measure_links, 3, True, ranks=ranks)
        assert all(each == measured[0] for each in measured)
        assert [link.bandwidth > 0 for link in measured[0].links] == [True] * (1 if ranks == 2 else ranks)
        assert not measured[0].across
        assert check_links(measured[0], [Facts()])[0].grade == Grade.OK


def under_torchrun(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    doctor = [sys.executable, "-c", "import sys; from gradsync.cli.main import main; sys.exit(main())", "doctor"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [*command, *doctor, "--brief", *arguments], capture_output=True, text=True, timeout=100, env=environment
    )


def test_under_torchrun_rank_0_speaks_for_all() -> None:
    done = under_torchrun("--json", TORCH_DISTRIBUTED_DEBUG="DETAIL")
    told = json.loads(done.stdout)
    assert [each["rank"] for each in told["ranks"]] == [0, 1]
    assert told["num_wrong"] >= 1
    assert done.returncode == 1


def test_under_torchrun_the_answer_is_the_last_thing_on_the_screen() -> None:
    done = under_torchrun(TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert "WRONG  TORCH_DISTRIBUTED_DEBUG=DETAIL on ranks 0-1" in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith("ok ")
    assert (done.returncode, done.stderr) == (0, "")


def test_between_hosts_another_mtu_is_found_and_links_and_clocks_are_measured(lab: MakeLab) -> None:
    codes, texts = zip(*lab(rate=None).spawn(see_doctor, 1, ["--json"], 1, 1400, "eth0"), strict=True)
    told = json.loads(texts[0])
    wrong = [each for each in told["findings"] if each["grade"] == "wrong"]
    assert (codes, texts[1]) == ((1, 0), "")
    assert [each["what"] for each in wrong] == ["MTUs differ between hosts"]
    assert "1500 (eth0) on rank 0 (host host0); 1400 (eth0) on rank 1 (host host1)" in wrong[0]["detail"]
    assert wrong[0]["fix"] == "sudo ip link set dev eth0 mtu 1400    # on rank 0 (host host0)"
    assert len(told["links"]) == 1
    assert abs(told["clocks"][0]["offset_s"]) <= told["clocks"][0]["error_s"] + 1e-3


def test_hosts_that_name_loopback_are_told_before_a_group_could_hang(lab: MakeLab) -> None:
    codes, texts = zip(*lab(rate=None).spawn(see_doctor, 1, ["--json"], 9, 0, "lo"), strict=True)
    whats = [each["what"] for each in json.loads(texts[0])["findings"] if each["grade"] == "wrong"]
    assert codes == (1, 0)
    assert whats[:2] == [f"gloo listens on loopback on rank {rank} (host host{rank})" for rank in (0, 1)]
    assert whats[2] == "the ranks could not talk to each other"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "nowhere is no folder"),
        (["."], "holds no trace"),
        (["--ranks", "1"], "needs a whole number from 2 to 64, got '1'"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_a_wrong_argument_is_a_sentence(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", *arguments]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert sentence in said.err


def test_a_launcher_that_said_half_of_it_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert main(["doctor", "--brief"]) == 1
    assert "RANK=1 is set but WORLD_SIZE is not" in " ".join(capsys.readouterr().out.split())


def test_ranks_are_not_ours_to_choose_under_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--ranks", "3"]) == 2
    assert "--ranks 3, but torchrun started 2: leave --ranks out" in capsys.readouterr().err
