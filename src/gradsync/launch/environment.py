"""The task that a launcher gave this process, read from its environment: which rank, of how many, meeting where.

Pure: the environment comes in as a mapping, a `Task` goes out, or None when this process is alone.

The innermost launcher wins, since its tasks are the processes that really run:

    torchrun (RANK)  >  Open MPI  >  PMI  >  SLURM step  >  SLURM job

PMI gives way to SLURM when both name the same number of tasks: then srun itself speaks PMI, and SLURM
also knows the hosts.

Note [Step before job]
----------------------
SLURM describes a job (what was allocated) and, inside srun, a step (what was started). Only a step's
tasks are processes, so `SLURM_STEP_NUM_TASKS` decides: `srun -n 1` in a job of 8 tasks is one rank, and so is the
shell that `srun --pty bash` or a cluster's `salloc` opens. A step of several components (`srun a : b`) is one too:
its number of tasks and its hosts are those of all components.
Without a step there are two cases.
- `SLURM_PROCID` is set: the batch script itself, which is task 0 of a job that announced more of them (see
  `_announced_tasks`). The other tasks were never started, so a group cannot form: an error at once, with `srun` as the
  way out, rather than one model that trains on an eighth of the allocation.
- it is not: a shell of `salloc`, or `ssh` to a node of the job. Whoever types `python train.py` there
  starts one process and sees that; it is one rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from math import prod

from gradsync.errors import LaunchError
from gradsync.launch.nodelist import expand_hosts

# Below Linux' range for outgoing connections (32768 and up), above the ports of well-known services.
_FIRST_PORT, _NUM_PORTS = 20000, 12000
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Task:
    """This process as a launcher started it, one of several, and where they meet."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None
    address: str
    port: int
    job: str
    """Tells apart two jobs that meet at one port by accident."""
    agent_store: bool = False
    """Torchrun's agent already listens at the port; else rank 0 does."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise LaunchError(
                f"{self.launcher} says this is rank {self.rank} of {self.world_size}, "
                f"but ranks go from 0 to {self.world_size - 1}"
            )
        if not 0 < self.port < 2**16:
            raise LaunchError(f"MASTER_PORT must be from 1 to 65535, got {self.port}")


@dataclass(frozen=True)
class _LauncherNames:
    """The variables by which an MPI names its tasks."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    export: str


_OPEN_MPI = _LauncherNames(
    launcher="Open MPI",
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    export="mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500",
)
_PMI = _LauncherNames(
    launcher="PMI",
    rank="PMI_RANK",
    size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_size="MPI_LOCALNRANKS",
    export="mpiexec -genv MASTER_ADDR <host of rank 0> -genv MASTER_PORT 29500",
)


def read_task(env: Mapping[str, str], parent: int) -> Task | None:
    """The task that the environment describes, or None when this process is alone.

    `parent` is the parent's pid: the ranks of one MPI job on a host share it when nothing else names
    the job.

    >>> read_task({}, parent=1) is None
    True
    >>> read_task({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}, 1).rank
    1
    """
    if "RANK" in env:
        return _torchrun(env)
    if _OPEN_MPI.size in env:
        return _mpi(_OPEN_MPI, env, parent)
    if _PMI.size in env and env[_PMI.size] != env.get("SLURM_STEP_NUM_TASKS"):
        return _mpi(_PMI, env, parent)
    if "SLURM_STEP_NUM_TASKS" in env:
        return _slurm_step(env)
    if "SLURM_PROCID" in env:
        _refuse_batch_script(env)
    elif env.get("WORLD_SIZE", "1") != "1":
        raise LaunchError(
            f"WORLD_SIZE={env['WORLD_SIZE']} is set but RANK is not: start with torchrun, "
            "or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every process"
        )
    return None


def _torchrun(env: Mapping[str, str]) -> Task | None:
    if "WORLD_SIZE" not in env:
        raise LaunchError(
            f"RANK={env['RANK']} is set but WORLD_SIZE is not: start with torchrun, "
            "or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every process"
        )
    rank, world_size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if (rank, world_size) == (0, 1):
        return None
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not env.get(name):
            raise LaunchError(
                f"RANK={rank} and WORLD_SIZE={world_size} are set but {name} is not: "
                "start with torchrun, or say where rank 0 listens with MASTER_ADDR and MASTER_PORT"
            )
    return Task(
        launcher="torchrun",
        rank=rank,
        world_size=world_size,
        local_rank=_number(env, "LOCAL_RANK") if "LOCAL_RANK" in env else None,
        address=env["MASTER_ADDR"],
        port=_number(env, "MASTER_PORT"),
        job=env.get("TORCHELASTIC_RUN_ID", "env"),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _mpi(names: _LauncherNames, env: Mapping[str, str], parent: int) -> Task | None:
    """MPI says who, but not where: on one host that is loopback, across hosts the user must say it.

    The port comes from the job's name, which every rank of Open MPI has. Where there is none, ranks of
    one host share their parent, mpiexec's proxy; a wrapper script per rank breaks that, and then
    MASTER_PORT must be given.
    """
    rank, world_size = _number(env, names.rank), _number(env, names.size)
    if (rank, world_size) == (0, 1):
        return None
    one_host = env.get(names.local_size) == env[names.size]
    named = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
    address = env.get("MASTER_ADDR") or (_LOOPBACK if one_host else None)
    if address is None or not (env.get("MASTER_PORT") or named or one_host):
        here = env.get(names.local_size, "an unknown number")
        missing = "MASTER_PORT" if address else "MASTER_ADDR"
        raise LaunchError(
            f"{names.launcher} started {world_size} tasks, {here} of them on this host, and does not say "
            f"where rank 0 listens ({missing} is not set): start with `{names.export} ...`"
        )
    job = named or (names.launcher if env.get("MASTER_PORT") else f"{names.launcher} under pid {parent}")
    return Task(
        launcher=names.launcher,
        rank=rank,
        world_size=world_size,
        local_rank=_number(env, names.local_rank) if names.local_rank in env else None,
        address=address,
        port=_port(env, job),
        job=job,
    )


def _slurm_step(env: Mapping[str, str]) -> Task | None:
    world_size = _number(env, "SLURM_STEP_NUM_TASKS")
    if world_size == 1:
        return None
    # Steps of one job may run side by side on the same hosts: the port is the step's.
    job = f"slurm {env.get('SLURM_JOB_ID', '?')}.{env.get('SLURM_STEP_ID', '0')}"
    return Task(
        launcher="SLURM",
        rank=_number(env, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(env, "SLURM_LOCALID") if "SLURM_LOCALID" in env else None,
        address=env.get("MASTER_ADDR") or _slurm_master(env),
        port=_port(env, job),
        job=job,
    )


def _slurm_master(env: Mapping[str, str]) -> str:
    """The first host of the step, or loopback where it is the only one."""
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if env.get(name):
            try:
                hosts = list(islice(expand_hosts(env[name]), 2))
            except ValueError as error:
                raise LaunchError(f"{name} cannot be read, {error}; set MASTER_ADDR to rank 0's host") from None
            return hosts[0] if len(hosts) > 1 else _LOOPBACK
    raise LaunchError(
        "SLURM started several tasks but SLURM_STEP_NODELIST is not set: set MASTER_ADDR to rank 0's host"
    )


def _refuse_batch_script(env: Mapping[str, str]) -> None:
    """Refuse a job of several tasks that runs without srun. See Note [Step before job]."""
    num_tasks, told = _announced_tasks(env)
    if num_tasks > 1:
        raise LaunchError(
            f"SLURM's job announced {num_tasks} tasks ({told}), but this process was not started by "
            "srun, so the others do not run: start with `srun python ...`, "
            "or with `srun -N 1 -n 1 python ...` for one rank"
        )


def _announced_tasks(env: Mapping[str, str]) -> tuple[int, str]:
    """Return how many tasks `srun` would start, and which variables say so.

    SLURM_NTASKS is set where `--ntasks` was given; without it there are `--ntasks-per-node`, or one, on each node.
    SLURM_TASKS_PER_NODE is always set, but without either option it may count a node's cores.
    """
    if "SLURM_NTASKS" in env:
        return _number(env, "SLURM_NTASKS"), "SLURM_NTASKS"
    told = [name for name in ("SLURM_JOB_NUM_NODES", "SLURM_NTASKS_PER_NODE") if name in env]
    return prod(_number(env, name) for name in told), " times ".join(told)


def _port(env: Mapping[str, str], job: str) -> int:
    """MASTER_PORT, or one that every rank derives from the job's name.

    Two jobs of one host get the same with a chance of 1 in 12000. Then the second says that the port
    is taken, and its ranks do not mix with the first's, since `Task.job` is in every key.
    """
    if env.get("MASTER_PORT"):
        return _number(env, "MASTER_PORT")
    return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name)
    if text is None or not (text.isascii() and text.isdigit()):
        raise LaunchError(f"{name} must be a whole number, got {text!r}: the launcher's environment is damaged")
    return int(text)
