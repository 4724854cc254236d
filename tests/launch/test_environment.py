"""What a launcher's environment means."""

from __future__ import annotations

import pytest
from launchers import BATCH, BATCH_OF_NODES, OPEN_MPI, PMI, STEP, TORCHRUN

from gradsync.errors import LaunchError
from gradsync.launch.environment import read_task


@pytest.mark.parametrize(
    ("env", "launcher", "rank", "world_size", "local_rank", "address"),
    [
        (TORCHRUN, "torchrun", 1, 4, 1, "n0"),
        ({k: v for k, v in TORCHRUN.items() if k != "LOCAL_RANK"}, "torchrun", 1, 4, None, "n0"),
        (STEP, "SLURM", 3, 4, 1, "node07"),
        (STEP | {"SLURM_STEP_NODELIST": "node07"}, "SLURM", 3, 4, 1, "127.0.0.1"),
        (STEP | {"MASTER_ADDR": "head"}, "SLURM", 3, 4, 1, "head"),
        (STEP | {"WORLD_SIZE": "4"}, "SLURM", 3, 4, 1, "node07"),
        # Where srun was typed: at times a login node, and never a promise about rank 0.
        (
            STEP | {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9", "SLURM_SRUN_COMM_HOST": "10.0.0.9"},
            "SLURM",
            3,
            4,
            1,
            "node07",
        ),
        # srun's --ntasks-per-node and the job's are no business of a step's task.
        (STEP | {"SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_NUM_NODES": "9"}, "SLURM", 3, 4, 1, "node07"),
        # One step of two components on hosts of two kinds: the job's numbers are those of one component.
        (STEP | {"SLURM_HET_SIZE": "2", "SLURM_STEP_NODELIST": "gpu-a[3,7],cpu01"}, "SLURM", 3, 4, 1, "gpu-a3"),
        # srun --mpi=pmix.
        (STEP | {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.71.0"}, "SLURM", 3, 4, 1, "node07"),
        (OPEN_MPI, "Open MPI", 1, 2, 1, "127.0.0.1"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "n0"}, "Open MPI", 1, 2, 1, "n0"),
        (PMI, "PMI", 1, 2, 1, "127.0.0.1"),
        # The innermost launcher wins.
        (STEP | TORCHRUN, "torchrun", 1, 4, 1, "n0"),
        (OPEN_MPI | TORCHRUN, "torchrun", 1, 4, 1, "n0"),
        (STEP | OPEN_MPI, "Open MPI", 1, 2, 1, "127.0.0.1"),
        (BATCH | OPEN_MPI, "Open MPI", 1, 2, 1, "127.0.0.1"),
        (STEP | PMI, "PMI", 1, 2, 1, "127.0.0.1"),
        # srun --mpi=pmi2 sets both, for the same tasks.
        (STEP | {"PMI_RANK": "3", "PMI_SIZE": "4"}, "SLURM", 3, 4, 1, "node07"),
    ],
)
def test_environment_names_the_task(
    env: dict[str, str], launcher: str, rank: int, world_size: int, local_rank: int | None, address: str
) -> None:
    task = read_task(env, parent=1)
    assert task is not None
    assert (task.launcher, task.rank, task.world_size) == (launcher, rank, world_size)
    assert (task.local_rank, task.address) == (local_rank, address)
    assert not task.agent_store


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        # `srun --pty bash`, and the shell of an salloc that makes it an interactive step of its own.
        STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"},
        BATCH | {"SLURM_NTASKS": "1"},
        BATCH_OF_NODES | {"SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_NUM_NODES": "1"},
        # No tasks were asked for: this is a count of cores.
        {"SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "48"},
        {k: v for k, v in BATCH.items() if k != "SLURM_PROCID"},
    ],
)
def test_one_task_is_alone(env: dict[str, str]) -> None:
    assert read_task(env, parent=1) is None


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"RANK": "0"}, "RANK=0 is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set but RANK is not"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "WORLD_SIZE=2 is set but RANK is not"),
        (TORCHRUN | {"RANK": "one"}, "RANK must be a whole number, got 'one'"),
        (TORCHRUN | {"RANK": "-1"}, "RANK must be a whole number, got '-1'"),
        (TORCHRUN | {"LOCAL_RANK": ""}, "LOCAL_RANK must be a whole number, got ''"),
        (TORCHRUN | {"RANK": "4"}, "rank 4 of 4, but ranks go from 0 to 3"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT must be from 1 to 65535, got 0"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT must be from 1 to 65535, got 70000"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR is not"),
        ({k: v for k, v in STEP.items() if k != "SLURM_PROCID"}, "SLURM_PROCID must be a whole number"),
        (STEP | {"SLURM_STEP_NODELIST": "node[7"}, "SLURM_STEP_NODELIST cannot be read"),
        (STEP | {"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}, "SLURM_STEP_NODELIST is not set"),
        (BATCH, r"announced 8 tasks \(SLURM_NTASKS\).* start with `srun python"),
        (BATCH_OF_NODES, r"announced 8 tasks \(SLURM_JOB_NUM_NODES times SLURM_NTASKS_PER_NODE\)"),
        ({"SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2"}, r"announced 2 tasks \(SLURM_JOB_NUM_NODES\)"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "1 of them on this host.*mpirun -x MASTER_ADDR"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "unknown number of them.*mpiexec -genv MASTER_ADDR"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "n0"}, "MASTER_PORT is not set"),
    ],
)
def test_damaged_environment_is_a_sentence(env: dict[str, str], sentence: str) -> None:
    with pytest.raises(LaunchError, match=sentence):
        read_task(env, parent=1)


def port_of(env: dict[str, str], parent: int = 1) -> int:
    task = read_task(env, parent)
    assert task is not None
    return task.port


def test_port_is_the_jobs_own_and_below_the_ephemeral_range() -> None:
    steps = [port_of(STEP | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(s)}) for job in range(50) for s in (0, 1)]
    assert all(20000 <= port < 32000 for port in steps)
    assert len(set(steps)) > 95
    assert port_of(STEP | {"SLURM_PROCID": "0"}) == port_of(STEP)
    assert port_of(OPEN_MPI, parent=1) == port_of(OPEN_MPI, parent=2)
    assert port_of(OPEN_MPI) != port_of(OPEN_MPI | {"PMIX_NAMESPACE": "prterun-vm-18@1"})
    assert port_of(PMI, parent=1) != port_of(PMI, parent=2)
    assert port_of(PMI | {"MASTER_PORT": "29500"}) == 29500


def test_ranks_under_wrapper_scripts_meet_when_the_port_is_given() -> None:
    env = PMI | {"MASTER_PORT": "29500"}
    assert read_task(env, parent=1) == read_task(env, parent=2)
