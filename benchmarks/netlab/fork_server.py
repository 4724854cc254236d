"""A process that has imported torch and gradsync once and forks ranks from itself: they start in milliseconds.

    lab ──"call this, as rank 1, in host1"──▶ nest ──fork──▶ enter ──fork──▶ the function, inside
        ◀──────────── its pid ──────────────

Nothing in the nest has ever computed, so its forks are sound: no thread pool has started, no CUDA context is there.
Nobody but the lab reaps its children, so a pid is that rank's for as long as the lab looks at it.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

_LENGTH = struct.Struct("!I")


class ForkServer:
    """The lab's end. A context manager; the process ends with it, or with the process that made it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
        with theirs:
            fd = theirs.fileno()
            command = [sys.executable, __file__, str(fd)]
            self._process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, pass_fds=[fd], start_new_session=True
            )

    def start(self, init: int, job: str, env: dict[str, str], out: int, value: int) -> int:
        """Begin `call(value, job)` inside the host of `init`, writing to `out`; the pid of its process group."""
        request = {"init": init, "job": job, "env": env, "folder": os.getcwd()}
        return self._ask(request, [out, value])

    def reap(self, pid: int) -> int:
        """The exit code of a rank that has ended or is about to."""
        return self._ask({"reap": pid}, [])

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: dict[str, Any], fds: list[int]) -> int:
        _send(self._socket, request, fds)
        answer, _ = _receive(self._socket)
        assert answer is not None, "the nest has ended"
        return int(answer["number"])


def serve(lab: socket.socket) -> None:
    """Fork on request, until the lab hangs up. Does not return in a child."""
    while True:
        request, fds = _receive(lab)
        if request is None:
            return
        if "reap" in request:
            number = os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])
        else:
            number = os.fork()
            if number == 0:
                lab.close()
                _live(request, *fds)
            os.setpgid(number, number)  # before the lab can want to kill the group
        for fd in fds:
            os.close(fd)
        _send(lab, {"number": number}, [])


def _live(request: dict[str, Any], out: int, value: int) -> None:
    try:
        for stream in (1, 2):
            os.dup2(out, stream)
        os.close(out)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["folder"])
        enter(request["init"], lambda: _act(value, request["job"]))
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _act(value: int, job: str) -> int:
    try:
        call(value, job)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
    return 0


def _send(wire: socket.socket, message: dict[str, Any], fds: list[int]) -> None:
    body = json.dumps(message).encode()
    socket.send_fds(wire, [_LENGTH.pack(len(body))], fds)
    wire.sendall(body)


def _receive(wire: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    head, fds, _, _ = socket.recv_fds(wire, _LENGTH.size, 2)
    if not head:
        return None, []
    body = bytearray()
    (nbytes,) = _LENGTH.unpack(head)
    while len(body) < nbytes:
        if not (data := wire.recv(nbytes - len(body))):
            return None, []
        body += data
    return json.loads(body), fds


if __name__ == "__main__":
    HERE = Path(__file__).resolve().parent
    sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

    import torch._dynamo  # noqa: F401  # the first optimizer imports it

    import gradsync  # noqa: F401
    from netlab.call import call
    from netlab.enter import enter

    serve(socket.socket(fileno=int(sys.argv[1])))
