"""The rank processes of one run: followed until all have ended, or ended."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

GRACE_S = 20.0  # after a failure the others have this long to fail too, as in `gradsync.launch.spawn`
_STACKS_S = 3.0  # for Python to write its stacks on SIGABRT

Echo = Callable[[int, str], None]
Start = Callable[[int], tuple[int, Callable[[], int]]]
"""From the file that a rank writes to, to the pid of its group and what waits for its exit code."""


class Ended(NamedTuple):
    """How a rank ended. `output` is both of its streams, as on a terminal; `code` is negative for a signal."""

    rank: int
    host: int
    code: int
    output: str


class RankProcess:
    """One rank's process, in a group of its own with whatever it starts."""

    def __init__(self, rank: int, host: int, start: Start) -> None:
        self.rank, self.host = rank, host
        self._pipe, out = os.pipe()
        try:
            self._pid, self._reap = start(out)
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(out)
        os.set_blocking(self._pipe, False)
        self._pidfd = os.pidfd_open(self._pid)
        self._open = True
        self._bytes = bytearray()
        self._shown = 0
        self.code: int | None = None

    def handles(self) -> list[int]:
        return [self._pidfd, self._pipe] if self._open else [self._pidfd]

    def update(self, echo: Echo | None) -> None:
        """Take what it wrote, and notice its end; not the pipe's, which a child of the rank may hold open."""
        ended = bool(select.select([self._pidfd], [], [], 0)[0])
        self._read()
        if ended and self.code is None:
            self.code = self._reap()
        end = len(self._bytes) if ended else self._bytes.rfind(b"\n") + 1
        if echo is not None and end > self._shown:
            for line in self._bytes[self._shown : end].decode(errors="replace").splitlines():
                echo(self.rank, line)
            self._shown = end

    def signal(self, number: int) -> None:
        """To the whole group, whose number is its own as long as nobody reaped its leader."""
        if self.code is None:
            os.killpg(self._pid, number)

    def result(self) -> Ended:
        assert self.code is not None
        return Ended(self.rank, self.host, self.code, self._bytes.decode(errors="replace"))

    def close(self) -> None:
        if self.code is None:
            self.signal(signal.SIGKILL)
            self.code = self._reap()
        os.close(self._pipe)
        os.close(self._pidfd)

    def _read(self) -> None:
        while self._open:
            try:
                data = os.read(self._pipe, 2**16)
            except BlockingIOError:
                return
            self._bytes += data
            self._open = bool(data)


def launch(command: Sequence[str], env: dict[str, str], fds: Sequence[int]) -> Start:
    """A member that is a command, with these files open."""

    def start(out: int) -> tuple[int, Callable[[], int]]:
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            pass_fds=fds,
        )
        return process.pid, process.wait

    return start


def follow(members: Sequence[RankProcess], timeout: float, grace: float, echo: Echo | None) -> str | None:
    """Until all have ended; None, or why it was not waited for longer. Then they are still to be closed."""
    start = time.monotonic()
    failed = False
    deadline = start + timeout
    while pending := [member for member in members if member.code is None]:
        left = deadline - time.monotonic()
        if left <= 0:
            ranks = [member.rank for member in pending]
            _ask_for_stacks(pending, echo)
            return f"ranks {ranks} did not finish within {time.monotonic() - start:.0f} s"
        _update(pending, left, echo)
        if not failed and any(member.code for member in members):
            failed, deadline = True, min(deadline, time.monotonic() + grace)
    return None


def _ask_for_stacks(members: Sequence[RankProcess], echo: Echo | None) -> None:
    """A Python rank, by PYTHONFAULTHANDLER, answers SIGABRT with what each thread is at; others just end."""
    for member in members:
        member.signal(signal.SIGABRT)
    deadline = time.monotonic() + _STACKS_S
    while (pending := [m for m in members if m.code is None]) and (left := deadline - time.monotonic()) > 0:
        _update(pending, left, echo)
    for member in pending:
        member.signal(signal.SIGKILL)
    while pending := [member for member in members if member.code is None]:
        _update(pending, None, echo)


def _update(members: Sequence[RankProcess], timeout: float | None, echo: Echo | None) -> None:
    ready = set(select.select([handle for member in members for handle in member.handles()], [], [], timeout)[0])
    for member in members:
        if ready.intersection(member.handles()):
            member.update(echo)
