"""Fresh rank processes, quickly: one process imports torch once, and forks whenever a scene begins.

A scene's process ends as any script does, by running off its last line: whether a rank can exit after an error
is part of what is tested, and only a real end of the interpreter shows it. The process that forks never runs a
tensor operation, so its children start with no OpenMP pool and no threads.

    pytest ── Nursery ──(JSON lines)── nursery.py ──fork── rank 0, rank 1, …
                                                            └ writes rank-0.jsonl, rank-0.txt
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class Journal:
    """What one rank tells the test, line by line; written at once, so a kill loses nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, event: str, **values: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"event": event, "at": time.monotonic(), **values}) + "\n")

    def read(self) -> list[Event]:
        return [json.loads(line) for line in self._path.read_text().splitlines()] if self._path.exists() else []

    def told(self, word: str) -> bool:
        """Whether the test has left this word for the rank, with `Scene.tell`."""
        return self._path.with_suffix(f".{word}").exists()


class Scene:
    """The running ranks of one scene, seen from the test."""

    def __init__(self, nursery: Nursery, folder: Path, pids: list[int]) -> None:
        self.pids = pids
        self._nursery = nursery
        self._folder = folder
        # Nobody reaps them before `end`, so the pids are theirs as long as we look.
        self._pidfds = [os.pidfd_open(pid) for pid in pids]
        self._ended: dict[int, float] = {}
        self._codes: list[int] | None = None

    def events(self, rank: int, event: str) -> list[Event]:
        return [each for each in Journal(self._folder / f"rank-{rank}.jsonl").read() if each["event"] == event]

    def text(self) -> str:
        """Everything that every rank said."""
        texts = [self._folder / f"rank-{rank}.{kind}" for rank in range(len(self.pids)) for kind in ("jsonl", "txt")]
        return "\n".join(f"--- {path.name} ---\n{path.read_text()}" for path in texts if path.exists())

    def wait(self, ranks: list[int], timeout: float) -> None:
        """Until the processes of these ranks have ended."""
        deadline = time.monotonic() + timeout
        poll = select.poll()
        for rank in ranks:
            poll.register(self._pidfds[rank], select.POLLIN)
        while missing := [rank for rank in ranks if rank not in self._ended]:
            ready = {fd for fd, _ in poll.poll(max(0, deadline - time.monotonic()) * 1000)}
            for rank in missing:
                if self._pidfds[rank] in ready:
                    self._ended[rank] = time.monotonic()
                    poll.unregister(self._pidfds[rank])
            assert ready, f"ranks {missing} did not end within {timeout} s\n{self.text()}"

    def ended_at(self, rank: int) -> float:
        return self._ended[rank]

    def kill(self, rank: int, sign: int = signal.SIGKILL) -> None:
        signal.pidfd_send_signal(self._pidfds[rank], sign)

    def tell(self, rank: int, word: str) -> None:
        """Leave a word for a rank that waits for it."""
        (self._folder / f"rank-{rank}.{word}").touch()

    def end(self) -> list[int]:
        """Kill who is still there; each rank's exit code, negative for a signal."""
        if self._codes is None:
            for rank in range(len(self.pids)):
                self.kill(rank)
            self.wait(list(range(len(self.pids))), 30)
            for pidfd in self._pidfds:
                os.close(pidfd)
            self._codes = self._nursery.ask({"reap": self.pids})
        return self._codes


class Nursery:
    """The test's end of nursery.py."""

    def __init__(self) -> None:
        env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def begin(self, play: str, folder: Path, ranks: int = 4, **arguments: Any) -> Scene:
        """Start `play` ("module:function") on every rank, with `rank`, `ranks`, `folder` and `arguments`."""
        folder.mkdir(parents=True, exist_ok=True)
        request = {"play": play, "folder": str(folder), "ranks": ranks, "arguments": arguments}
        return Scene(self, folder, self.ask(request))

    def ask(self, request: Event) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=30)


def serve() -> None:
    """Fork on request. Returns in the parent at the end of input, and in every child when its play is over."""
    import torch._dynamo  # noqa: F401  # the first optimizer imports it

    import gradsync  # noqa: F401

    gc.freeze()  # what is here now is not written to by the children's collector, so it stays shared
    alive: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "reap" in request:
            alive -= set(request["reap"])
            print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in request["reap"]]), flush=True)
            continue
        module, function = request["play"].split(":")
        play = getattr(importlib.import_module(module), function)
        pids = []
        for rank in range(request["ranks"]):
            pid = os.fork()
            if pid == 0:
                folder = Path(request["folder"])
                _redirect(folder / f"rank-{rank}.txt")
                play(rank=rank, ranks=request["ranks"], folder=folder, **request["arguments"])
                return
            pids.append(pid)
        alive |= set(pids)
        print(json.dumps(pids), flush=True)
    for pid in alive:  # pytest is gone before its scene was over
        os.kill(pid, signal.SIGKILL)


def _redirect(path: Path) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for fd, target in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(fd, target)


if __name__ == "__main__":
    serve()
