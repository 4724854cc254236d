"""The facts that `gradsync doctor` gathers: they survive JSON, and are read rightly from what the kernel shows."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import pytest

from gradsync.cli.doctor.check_versions import OLDEST, TOO_NEW
from gradsync.cli.doctor.gather import gather
from gradsync.cli.doctor.limits import _quota, trace_folder
from gradsync.cli.doctor.rank_facts import Nic, facts_of


def test_facts_survive_json_and_a_rank_of_another_version() -> None:
    own = gather(os.environ, None)
    record = json.loads(json.dumps(own.record()))
    assert facts_of(record) == own
    del record["level"]
    record |= {"mood": "good", "nics": [5, {"name": 5}], "variables": {"NCCL_A": 5}, "rank": True, "usable_cpus": 2}
    known = facts_of(record)
    assert (known.level, known.nics, known.variables, known.rank, known.usable_cpus) == ("", [Nic()], {}, 0, 2.0)


def test_the_supported_torch_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    wanted = f"torch>={'.'.join(map(str, OLDEST))},<{TOO_NEW[0]}"
    assert wanted in project["dependencies"]
    assert TOO_NEW[1] == 0


@pytest.mark.parametrize(
    ("files", "own", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, "0::/\n", 1.5),
        ({"cpu.max": "max 100000\n"}, "0::/\n", 0.0),
        ({"job/cpu.max": "50000 100000\n", "cpu.max": "200000 100000"}, "0::/job/task\n", 0.5),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu,cpuacct:/docker/1\n", 3.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu:/\n", 0.0),
        ({"cpu.max": "garbage"}, "garbage", 0.0),
    ],
)
def test_a_containers_quota_is_read(tmp_path: Path, files: dict[str, str], own: str, cores: float) -> None:
    for name, text in files.items():
        (tmp_path / "mount" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mount" / name).write_text(text)
    (tmp_path / "own").write_text(own)
    assert _quota(tmp_path / "mount", tmp_path / "own") == cores


def test_a_folder_for_traces_is_tried(tmp_path: Path) -> None:
    assert trace_folder("") == ("", -1)
    assert trace_folder(str(tmp_path / "new" / "run"))[0] == ""
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    assert trace_folder(str(tmp_path / "file" / "run"))[0].endswith("is a file")
    assert trace_folder("/proc/run")[0]
