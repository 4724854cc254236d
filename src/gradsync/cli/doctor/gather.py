"""This process's facts. Whatever cannot be read stays as if unknown: a doctor must not fall ill itself."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import torch

from gradsync.cli.doctor.gpus import gpus, topology
from gradsync.cli.doctor.limits import (
    has_memfd,
    limit_of_files,
    locked_memory,
    shared_memory,
    trace_folder,
    usable_cpus,
)
from gradsync.cli.doctor.network_interfaces import infiniband, nics
from gradsync.cli.doctor.rank_facts import Facts
from gradsync.kernels.library import load
from gradsync.launch.choose_backend import available_backends
from gradsync.launch.environment import Task
from gradsync.launch.interface import endpoint_towards, network_identity

_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "GRADSYNC_", "OMP_", "MKL_", "CUDA_", "MASTER_", "TP_SOCKET_")
_MOST_LETTERS = 200


def gather(env: Mapping[str, str], task: Task | None) -> Facts:
    """This rank's facts; to be called before the group is made, which changes the environment."""
    library = load()
    level = "" if library is None else library.gradsync_level().decode()
    shm_nbytes, shm_free_nbytes = shared_memory()
    trace = env.get("GRADSYNC_TRACE", "")
    problem, free_nbytes = trace_folder(trace)
    cards = gpus()
    return Facts(
        rank=0 if task is None else task.rank,
        world_size=1 if task is None else task.world_size,
        host=socket.gethostname(),
        network=network_identity(),
        launcher="" if task is None else task.launcher,
        num_nodes=num_nodes(env),
        master="" if task is None else task.address,
        python=platform.python_version(),
        torch=torch.__version__,
        gradsync=_own_version(),
        nccl=_nccl_version(),
        backends=available_backends(),
        library=library is not None,
        level=level,
        compiler=shutil.which(env.get("CC", "")) or shutil.which("cc") or shutil.which("gcc") or "",
        variables=relevant(env),
        nics=nics(),
        name_address=_address_of_name(),
        towards_master="" if task is None else endpoint_towards(task.address).interface or "",
        infiniband=infiniband(),
        shm_nbytes=shm_nbytes,
        shm_free_nbytes=shm_free_nbytes,
        memfd=has_memfd(),
        memlock_nbytes=locked_memory(),
        num_files=limit_of_files(),
        num_cpus=os.cpu_count() or 0,
        usable_cpus=usable_cpus(),
        num_threads=torch.get_num_threads(),
        gpus=cards,
        device=-1 if not cards or task is None or task.local_rank is None else task.local_rank % len(cards),
        topology=topology() if cards else "",
        trace=trace,
        trace_problem=problem,
        trace_free_nbytes=free_nbytes,
    )


def relevant(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that somebody on the path reads.

    >>> relevant({"NCCL_DEBUG": "INFO", "PASSWORD": "secret"})
    {'NCCL_DEBUG': 'INFO'}
    """
    return {name: value[:_MOST_LETTERS] for name, value in sorted(env.items()) if name.startswith(_PREFIXES)}


def num_nodes(env: Mapping[str, str]) -> int:
    """The number of hosts, as far as the launcher says; 0 if it does not.

    >>> num_nodes({"GROUP_WORLD_SIZE": "2"}), num_nodes({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}), num_nodes({})
    (2, 2, 0)
    """
    for name in ("GROUP_WORLD_SIZE", "SLURM_STEP_NUM_NODES", "SLURM_NNODES"):
        if env.get(name, "").isdigit():
            return int(env[name])
    here, all_ = env.get("LOCAL_WORLD_SIZE", ""), env.get("WORLD_SIZE", "")
    return -(-int(all_) // int(here)) if here.isdigit() and all_.isdigit() and int(here) else 0


def _own_version() -> str:
    try:
        return version("gradsync")
    except PackageNotFoundError:
        return ""


def _nccl_version() -> str:
    if not torch.cuda.is_available():
        return ""
    try:
        found = torch.cuda.nccl.version()
    except (AttributeError, RuntimeError):  # a build without it
        return ""
    return ".".join(map(str, found)) if isinstance(found, tuple) else str(found)


def _address_of_name() -> str:
    try:
        return str(socket.getaddrinfo(socket.gethostname(), 0)[0][4][0])
    except OSError:
        return ""
