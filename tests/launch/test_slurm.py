"""examples/slurm.sbatch, both ways, with an `srun` that starts tasks of this host and tells them what SLURM would."""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from launchers import without_launcher

from gradsync.launch.spawn import RankPool

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_S = 250  # for a busy machine
JOB = {
    "SLURM_JOB_ID": "71",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_JOB_NODELIST": "localhost",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_TASKS_PER_NODE": "2",
    "SLURM_CPUS_PER_TASK": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}

SRUN = """#!{python}
import itertools, os, subprocess, sys
options = list(itertools.takewhile(lambda argument: argument.startswith("--"), sys.argv[1:]))
command = sys.argv[1 + len(options):]
given = dict(option[2:].split("=") for option in options)
per_node = given.get("ntasks-per-node", os.environ["SLURM_NTASKS_PER_NODE"])
count = given.get("ntasks", per_node)
step = {{"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "localhost"}}
step |= {{"SLURM_STEP_NUM_TASKS": count, "SLURM_NTASKS": count, "SLURM_NTASKS_PER_NODE": per_node}}
step |= {{"SLURM_LAUNCH_NODE_IPADDR": "192.0.2.7"}}
tasks = []
for rank in map(str, range(int(count))):
    env = os.environ | step | {{"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0"}}
    tasks.append(subprocess.Popen(command, env=env))
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = '#!/bin/sh\n[ "$1 $2" = "show hostnames" ] && echo "$3"\n'


pytestmark = pytest.mark.timeout(LIMIT_S + 30)


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch script, with the commands of SLURM on its path."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {"srun": SRUN.format(python=sys.executable), "scontrol": SCONTROL}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return without_launcher(os.environ) | JOB | {"PATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def port() -> Iterator[str]:
    """Bound, but not listening, so that nobody else is given it and a rank may still listen on it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield str(holder.getsockname()[1])


@pytest.fixture(scope="module")
def weights(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What the same script trains on two ranks that no launcher started."""
    folder = tmp_path_factory.mktemp("pool")
    pool.run(train, str(folder), ranks=2)
    return torch.load(folder / "rank0.pt", weights_only=True)


def train(folder: str) -> None:
    with mock.patch.object(sys, "argv", ["train.py", "--steps", "12", "--save", folder]):
        runpy.run_path(str(EXAMPLES / "train.py"), run_name="__main__")


def sbatch(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(EXAMPLES / "slurm.sbatch"), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.parametrize("way", ["srun", "torchrun"])
def test_the_batch_script_trains_on_every_task(
    way: str, cluster: dict[str, str], port: str, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    env = cluster | {"WAY": way, "MASTER_PORT": port}
    arguments = ["--steps", "12", "--save", str(tmp_path / "out")]
    done = sbatch(env, str(EXAMPLES / "train.py"), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks" in done.stdout
    assert "ranks 0-1 of 2, gloo on lo" in done.stderr
    for rank in range(2):
        trained = torch.load(tmp_path / "out" / f"rank{rank}.pt", weights_only=True)
        for name, weight in weights.items():
            assert torch.equal(weight, trained[name]), (rank, name)


def test_another_way_is_a_sentence(cluster: dict[str, str]) -> None:
    done = sbatch(cluster | {"WAY": "mpirun"}, "train.py")
    assert (done.returncode, done.stderr) == (2, "WAY is srun or torchrun, got mpirun\n")
