"""Hosts of a network on one machine, joined by links of a given speed.

    with Lab(hosts=2, rate="100mbit") as lab:
        lab.run(["python", "train.py"], ranks_per_host=[2, 2])

    ┌─ host0: 10.0.0.1 ─┐   100 Mbit/s each way   ┌─ host1: 10.0.0.2 ─┐
    │  rank 0   rank 1  ├─ eth0 ═══════════ eth0 ─┤  rank 2   rank 3  │
    └───────────────────┘                         └───────────────────┘

A host has its own network, processes, /dev/shm and name, and shares the file system and the processor. Inside a
host loopback is as fast as ever; everything between hosts goes through the kernel's TCP and a token bucket (`wiring`).
When the lab ends, or the process that made it ends in any way, everything in it is gone (`process`).
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from gradsync.cli.demo.slow_link.namespaces import missing_capabilities
from gradsync.cli.demo.slow_link.shaped_link import NoLink
from netlab import wiring
from netlab.fork_server import ForkServer
from netlab.placement import RankPlace, environment, rank_places
from netlab.rank_processes import GRACE_S, Echo, Ended, RankProcess, Start, follow, launch
from netlab.traffic import Traffic, payload, sent
from netlab.wiring import LabError, Shaper, address

__all__ = ["Ended", "Lab", "LabError", "RankFailed", "Traffic", "available", "payload"]

_HERE = Path(__file__).resolve().parent
_ENTER = str(_HERE / "enter.py")
_REFUSED = 77  # how host_process.py ends where the kernel allows no host
_PYTHON = [sys.executable, "-I", "-S"]  # nothing that the user's environment could change; starts in 15 ms


class NoHost(LabError):
    """The kernel allows no host here, though this process has the rights: a container with rules of its own."""


class RankFailed(LabError):
    """A rank failed or did not finish; the message holds every rank's output, `ended` how each ended."""

    def __init__(self, reason: str, ended: list[Ended]) -> None:
        self.ended = ended
        texts = (f"--- rank {e.rank} on host{e.host}: {_outcome(e.code)} ---\n{e.output}" for e in ended)
        super().__init__(reason + "\n" + "\n".join(texts))


class Lab:
    """A context manager: hosts and links exist inside `with`.

    Args:
        hosts: How many, from 2 to 64. Two share a link; more have one each, to a switch.
        rate: Of every link, each way: "100mbit" or bits per second, headers included. None: as fast as it goes.
        burst: Bytes that leave at full speed after a pause; see `wiring.Shaper`.
        queue: Bytes that wait at a link before others are dropped.
        share_processes: Hosts have no processes and no /dev/shm of their own, as clients of NVIDIA's MPS need it; when
            the lab ends, whoever is in its networks is killed.
        fork_server: Where `spawn` gets its processes, so that they need not import torch; see `fork_server.ForkServer`.
    """

    def __init__(
        self,
        hosts: int = 2,
        rate: str | int | None = "1gbit",
        burst: int | None = None,
        queue: int | None = None,
        fork_server: ForkServer | None = None,
        share_processes: bool = False,
    ) -> None:
        if type(hosts) is not int or not 2 <= hosts <= 64:
            raise ValueError(f"a lab has from 2 to 64 hosts, got {hosts!r}")
        self.hosts = hosts
        self.shaper = None if rate is None else Shaper.of(rate, burst, queue)
        self.inits: list[int] = []
        """The first process of each host, by its pid out here."""
        self._fork_server = fork_server
        self._share_processes = share_processes
        self._host_processes: list[subprocess.Popen[str]] = []
        self._runs = 0

    @property
    def addresses(self) -> list[str]:
        return [address(host) for host in range(self.hosts)]

    def __enter__(self) -> Lab:
        try:
            self.inits = [self._start_host(f"host{host}") for host in range(self.hosts)]
            switch = self._start_host("switch") if self.hosts > 2 else None
            wiring.connect(self.inits, switch, self.shaper)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End every process of every host, and wait until they are gone."""
        holders, self._host_processes, self.inits = self._host_processes, [], []
        for process in holders:
            assert process.stdin is not None
            process.stdin.close()
        for process in holders:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def run(
        self,
        command: Sequence[str],
        ranks_per_host: int | Sequence[int] = 1,
        env: dict[str, str] | None = None,
        timeout: float = 60,
        check: bool = True,
        echo: Echo | None = None,
        share_gpus: bool = False,
    ) -> list[Ended]:
        """Run `command` once per rank, with torchrun's environment, and return how each ended.

        `env` is added to this process's environment. If a rank fails the others get a while to fail too, then
        `RankFailed` shows every rank's output; with `check=False` a failure is returned like a success. After `timeout`
        seconds whoever still runs is ended, and `RankFailed` shows where it was. `echo(rank, line)` sees output as it
        comes. With `share_gpus` NCCL serves ranks on GPUs, several on one too, through the link; in time slices.
        """

        def prepare(rank: int, init: int, full: dict[str, str]) -> Start:
            return launch([*_PYTHON, _ENTER, str(init), *command], full, [])

        return self._run(prepare, rank_places(self.hosts, ranks_per_host), env, timeout, check, echo, share_gpus)

    def spawn(
        self,
        fn: Callable[..., Any],
        ranks_per_host: int | Sequence[int] = 1,
        *args: Any,
        env: dict[str, str] | None = None,
        timeout: float = 60,
        share_gpus: bool = False,
    ) -> list[Any]:
        """Each rank's value of `fn(*args)`, in new processes that import `fn` by name; arguments and values are JSON.

        There is no group yet when `fn` starts: it calls `gs.init()`. `share_gpus` is that of `run`.
        """
        module, name = fn.__module__, fn.__qualname__
        if module == "__main__" or "." in name or "<" in name:
            raise ValueError(f"ranks import {module}.{name} by name: define it at the top of a module")
        job = json.dumps({"path": sys.path, "module": module, "function": name, "arguments": args})
        places = rank_places(self.hosts, ranks_per_host)
        values = [os.memfd_create(f"rank{rank}") for rank in range(len(places))]

        def prepare(rank: int, init: int, full: dict[str, str]) -> Start:
            value = values[rank]
            if (fork_server := self._fork_server) is not None:
                return lambda out: (
                    (pid := fork_server.start(init, job, full, out, value)),
                    lambda: fork_server.reap(pid),
                )
            command = [sys.executable, str(_HERE / "call.py"), str(value), job]
            return launch([*_PYTHON, _ENTER, str(init), *command], full, [value])

        try:
            self._run(prepare, places, env, timeout, check=True, echo=None, share_gpus=share_gpus)
            return [json.loads(os.pread(fd, os.fstat(fd).st_size, 0)) for fd in values]
        finally:
            for fd in values:
                os.close(fd)

    def counters(self) -> list[Traffic]:
        """What each host has sent over its link so far."""
        return [sent(Path(f"/proc/{init}/net/dev").read_text()) for init in self.inits]

    def times_held(self) -> list[int]:
        """How often each host's shaper made a packet wait; 0 where nothing was slowed down."""
        return [wiring.times_held(init) for init in self.inits]

    def _start_host(self, name: str) -> int:
        command = [*_PYTHON, str(_HERE / "host_process.py"), name, str(os.getpid())]
        command += ["share"] if self._share_processes else []
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._host_processes.append(process)
        assert process.stdin is not None
        assert process.stdout is not None
        # The second form is what a socket of IPv6 that speaks IPv4, such as torch's store, looks up.
        neighbours = [f"{address(host)} host{host}\n::ffff:{address(host)} host{host}\n" for host in range(self.hosts)]
        process.stdin.write("".join(["127.0.0.1 localhost\n", *neighbours, "\n"]))
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            refused = process.wait(GRACE_S) == _REFUSED
            raise (NoHost if refused else LabError)(f"{name} could not be made; its error is above")
        return int(answer)

    def _run(
        self,
        prepare: Callable[[int, int, dict[str, str]], Start],
        places: list[RankPlace],
        env: dict[str, str] | None,
        timeout: float,
        check: bool,
        echo: Echo | None,
        share_gpus: bool,
    ) -> list[Ended]:
        if not self.inits:
            raise ValueError("the lab is not open: use it in a `with` statement")
        self._runs += 1
        members: list[RankProcess] = []
        try:
            for place in places:
                full = environment(place, len(places), self.hosts, self._runs, env or {}, share_gpus)
                members.append(RankProcess(place.rank, place.host, prepare(place.rank, self.inits[place.host], full)))
            late = follow(members, timeout, GRACE_S if check else timeout, echo)
            ended = [member.result() for member in members]
        finally:
            for member in members:
                member.close()
        failed = [each.rank for each in ended if each.code]
        if late or (check and failed):
            raise RankFailed(late or f"{len(failed)} of {len(ended)} ranks failed: {failed}", ended)
        return ended


@functools.cache
def available() -> str | None:
    """Why there can be no lab here; None if there can be one."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if missing := missing_capabilities():
        return f"making network namespaces needs root ({' and '.join(missing)})"
    try:
        with Lab(hosts=3):
            return None
    except (NoHost, NoLink, OSError) as error:
        return str(error)


def _outcome(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"ended by signal {-code}"
