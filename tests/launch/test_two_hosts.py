"""Two hosts, each a network of its own: what a user with two machines runs, and what srun tells its tasks there."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from launchers import without_launcher

import gradsync as gs
from gradsync.launch.environment import read_task
from gradsync.launch.spawn import RankPool
from netlab.fixture import MakeLab

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "torchrun_two_hosts.sh"
PORT = "29700"  # in a network where nobody else listens
LIMIT_S = 250  # for a busy machine
RESUME = [str(EXAMPLES / "resume.py"), "--steps", "12", "--every", "5", "--compress"]

# A lab tells each host which one it is, and more than a user's shell would know.
AS_A_USER = "node=$GROUP_RANK; unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME; "
AS_A_USER += 'exec "$0" "$node" "$@"'

pytestmark = pytest.mark.timeout(LIMIT_S + 30)


def resume(folder: str) -> None:
    with mock.patch.object(sys, "argv", [*RESUME, "--folder", folder]):
        runpy.run_path(RESUME[0], run_name="__main__")


@pytest.fixture
def undisturbed(pool: RankPool, tmp_path: Path) -> dict[str, torch.Tensor]:
    """The weights of a run on one host in which nobody dies."""
    pool.run(resume, str(tmp_path / "undisturbed"), ranks=2)
    return torch.load(tmp_path / "undisturbed" / "final.pt", weights_only=True)


def test_the_script_trains_on_two_hosts_and_starts_again_after_a_death(
    lab: MakeLab, undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    hosts, folder = lab(hosts=2, rate=None), tmp_path / "run"
    command = ["sh", "-c", AS_A_USER, str(SCRIPT), hosts.addresses[0], PORT]
    command += [*RESUME, "--folder", str(folder), "--die", "1", "7"]
    first, second = hosts.run(command, env={"PYTHON": sys.executable, "RESTARTS": "1"}, timeout=LIMIT_S)
    assert "rank 0 of 2, gloo on eth0 (10.0.0.1)" in first.output
    assert "rank 1 of 2, gloo on eth0 (10.0.0.2)" in second.output
    assert "PeerLost: [rank 0/2 step 7" in first.output
    assert "rank 0 resumes at step 5" in first.output
    assert "rank 1 resumes at step 5" in second.output
    trained = torch.load(folder / "final.pt", weights_only=True)
    for name, weight in undisturbed.items():
        assert torch.equal(weight, trained[name]), name


def test_the_script_says_how_it_is_called() -> None:
    done = subprocess.run([str(SCRIPT), "0"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2
    assert "NODE_RANK MASTER_ADDRESS PORT SCRIPT" in done.stderr


def as_a_task_of_srun(nodelist: str) -> list[object]:
    """What a rank finds when srun and nothing else started it: its task, and the sum of the ranks' numbers."""
    rank, host = os.environ["RANK"], os.environ["GROUP_RANK"]
    clean = without_launcher(os.environ)
    os.environ.clear()
    os.environ.update(clean)
    os.environ |= {"SLURM_JOB_ID": "71", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "3"}
    os.environ |= {"SLURM_STEP_NODELIST": nodelist, "SLURM_JOB_NODELIST": nodelist, "SLURM_NODEID": host}
    os.environ |= {"SLURM_PROCID": rank, "SLURM_LOCALID": "1" if rank == "1" else "0"}
    task = read_task(os.environ, parent=1)
    assert task is not None
    gs.init(timeout=50)
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    dist.destroy_process_group()
    return [task.launcher, task.address, interface, int(total)]


def test_tasks_of_srun_meet_on_the_first_host_of_their_step(lab: MakeLab) -> None:
    found = lab(hosts=2, rate=None).spawn(as_a_task_of_srun, [2, 1], "host[0-1]")
    assert found == [["SLURM", "host0", "eth0", 3]] * 3
