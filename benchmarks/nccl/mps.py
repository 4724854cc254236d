"""NVIDIA's multi-process service, so that the ranks of one GPU run at the same time and not in turns.

A daemon with folders of its own, so it is nobody else's, and it ends with the `with` statement.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_CONTROL = "nvidia-cuda-mps-control"
_PATIENCE_S = 15.0


@contextlib.contextmanager
def running_mps(wanted: bool = True) -> Iterator[dict[str, str]]:
    """What ranks need in their environment to share the GPU; nothing where there is no MPS."""
    if not wanted or shutil.which(_CONTROL) is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in variables.values():
            Path(path).mkdir()
        try:
            if problem := _start(variables, Path(folder, "said")):
                print(f"no MPS: {problem}; ranks take turns on the GPU", flush=True)
            yield {} if problem else variables
        finally:
            _end(variables)


def _start(variables: dict[str, str], said: Path) -> str:
    """What went wrong. Its output goes to a file, since a daemon that kept a pipe open would be waited for."""
    try:
        with said.open("w") as file:
            subprocess.run(
                [_CONTROL, "-d"],
                env=os.environ | variables,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=_PATIENCE_S,
                check=True,
            )
    except subprocess.SubprocessError as error:
        return f"{error} {said.read_text().strip()}"
    return ""


def _end(variables: dict[str, str]) -> None:
    """Ask it to quit; whatever of it is still there then is killed."""
    pids = [_daemon(variables), *map(int, _ask("get_server_list", variables).split())]
    _ask("quit", variables)
    deadline = time.monotonic() + _PATIENCE_S
    while (left := [pid for pid in pids if pid and _lives(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _ask(what: str, variables: dict[str, str]) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        asked = subprocess.run(
            [_CONTROL],
            input=f"{what}\n",
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
        )
        return asked.stdout if all(word.isdigit() for word in asked.stdout.split()) else ""
    return ""


def _daemon(variables: dict[str, str]) -> int:
    path = Path(variables["CUDA_MPS_PIPE_DIRECTORY"], f"{_CONTROL}.pid")
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdigit() else 0


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
