"""Run a command inside a host: `python enter.py INIT_PID COMMAND...`; ends as the command ends.

A process cannot change its own process namespace, only its children's, so the command is a child:

    lab ──▶ enter.py, outside ──▶ command, inside      one process group: whoever kills it kills both
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from netlab import kernel


def enter(init: int, act: Callable[[], int]) -> NoReturn:
    """Let a child `act` inside the host, and end with its exit code or by its signal."""
    folder = os.getcwd()
    kernel.namespaces.join(init, kernel.HOST)
    os.chdir(folder)  # joining another mount namespace goes to its root
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a run that times out is ended by SIGABRT
    child = os.fork()
    if child == 0:
        kernel.namespaces.die_with_parent(signal.SIGKILL)
        os._exit(act())
    signal.signal(signal.SIGABRT, signal.SIG_IGN)  # it is the command that is asked for its stacks
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def execute(command: list[str]) -> int:
    """Become the command; 127 where there is none, as shells do."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]!r}: {error.strerror}", file=sys.stderr, flush=True)
        return 127


if __name__ == "__main__":
    enter(int(sys.argv[1]), lambda: execute(sys.argv[2:]))
