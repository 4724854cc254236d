"""Ranks started by Open MPI's mpirun, so that MPI's all-reduce runs in the same processes as all others.

    gradsync bench ── mpirun ─┬─ python -m gradsync.cli.bench.mpirun FOLDER PID     rank 0
                              └─ python -m gradsync.cli.bench.mpirun FOLDER PID     rank 1

A rank that fails ends its process at once, upon which mpirun ends all others; and every rank ends itself when
the bench, PID, or mpirun is gone.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import torch.distributed as dist

from gradsync.cli.bench.bench_worker import run_bench
from gradsync.errors import GradSyncError
from gradsync.launch.init import init

CONFIG, OUTPUT = "config", "output"

_TOLD_LINES = 20
_END_S = 10.0
# What another launcher around the bench has left in the environment would mislead mpirun and its ranks.
_LAUNCHERS = ("SLURM_", "OMPI_", "PMIX_", "PMI_", "MASTER_")
_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def missing_mpi() -> str | None:
    """Return why ranks cannot be started by mpirun; None if they can."""
    if find_spec("mpi4py") is None:
        return "mpi4py is not installed (pip install mpi4py)"
    if (mpirun := shutil.which("mpirun")) is None:
        return "there is no mpirun in PATH (install Open MPI, for example apt install openmpi-bin)"
    said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    return None if "Open MPI" in said else f"{mpirun} is not Open MPI's"


def run_under_mpirun(config: str, ranks: int, threads: int, folder: str, timeout: float) -> None:
    """Run `run_bench` on ranks of this machine; on return, or whatever happens, all of them have ended."""
    (Path(folder) / CONFIG).write_text(config)
    command = ["mpirun", "-n", str(ranks), "--oversubscribe", "--bind-to", "none", sys.executable]
    command += ["-m", "gradsync.cli.bench.mpirun", folder, str(os.getpid())]
    with (
        open(Path(folder) / OUTPUT, "w+") as output,
        # A session of its own: Ctrl-C comes to the bench alone, which then ends the ranks.
        subprocess.Popen(
            command,
            env=_environment(os.environ, threads),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise GradSyncError(f"bench: the ranks did not finish within {timeout:.0f} s; measure less") from None
        finally:
            _end(process)
        if code != 0:
            output.seek(0)
            said = "\n".join(output.read().splitlines()[-_TOLD_LINES:])
            raise GradSyncError(f"bench: mpirun ended with {code}; --no-mpi does without it. It said:\n{said}")


def _environment(outer: Mapping[str, str], threads: int) -> dict[str, str]:
    env = {name: value for name, value in outer.items() if not name.startswith(_LAUNCHERS)}
    for name in _OF_TORCHRUN:
        env.pop(name, None)
    env["OMP_NUM_THREADS"] = str(threads)
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if os.geteuid() == 0:
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return env


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask mpirun to end, which ends the ranks and removes their files; insist if it does not."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its ranks see it


def main(folder: str, bench: int) -> None:
    """The life of a rank."""
    threading.Thread(target=_end_with, args=(bench, os.getppid()), name="watch-parents", daemon=True).start()
    try:
        init()
        run_bench((Path(folder) / CONFIG).read_text(), folder)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        # Not by a return: MPI's own end would wait for the ranks that wait for this one.
        os._exit(1)


def _end_with(*pids: int) -> None:
    """End this process when one of these ends."""
    poll = select.poll()
    for pid in pids:
        try:
            poll.register(os.pidfd_open(pid), select.POLLIN)
        except ProcessLookupError:
            os._exit(1)
    poll.poll()
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
