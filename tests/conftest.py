"""One pool of rank processes for the whole session, and checks that no test leaves anything behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from gradsync.launch.spawn import RankPool
from netlab.fixture import fork_server, lab  # noqa: F401  # for every folder

Run = Callable[..., list[Any]]

settings.register_profile("any machine", deadline=None)  # no test asserts a duration
settings.load_profile("any machine")

# Files that start programs of their own take longest: begun last, one would keep a worker while the other is idle.
FIRST = ("tests/integrations", "tests/cli", "tests/launch", "tests/test_", "tests/docs", "tests/torch_backend")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))


@pytest.fixture(scope="session")
def warm() -> ForkServerContext:
    """Starts ranks as forks of one process that has imported what they need and has never computed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "gradsync", "pytest", "hypothesis"])
    forkserver.ensure_running()  # now, with an environment that no test has changed
    return context


@pytest.fixture(scope="session")
def pool(warm: ForkServerContext) -> Iterator[RankPool]:
    """Four processes, one thread each, started on first use; a lost one is replaced in a moment."""
    with RankPool(4, threads=1, context=warm) as ranks:
        yield ranks


@pytest.fixture
def run(pool: RankPool) -> Run:
    """`run(fn, *args, ranks=2)`: each rank's value of `fn(*args)`; every rank's traceback if one fails."""

    def run_ranks(fn: Callable[..., Any], *args: Any, ranks: int = 2, timeout: float = 60) -> list[Any]:
        return pool.run(fn, *args, ranks=ranks, timeout=timeout)

    return run_ranks


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Threads, child processes and shared memory are as before, the session's pool apart."""
    threads, children, shm = _threads(), _children(), _shared_memory()
    yield
    pool_children = set()
    if "pool" in request.fixturenames:
        pool_children = {child.pid for child in multiprocessing.active_children()}
    assert _threads() <= threads, f"threads left behind: {_threads() - threads}"
    assert _children() - children <= pool_children, f"processes left behind: {_children() - children - pool_children}"
    assert _shared_memory() <= shm or _gone_soon(shm), f"left in /dev/shm: {_shared_memory() - shm}"


def _gone_soon(shm: set[str]) -> bool:
    """What other processes of this machine have there for a moment, a second worker of the tests say, is not ours."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if _shared_memory() <= shm:
            return True
        time.sleep(0.1)
    return False


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def _children() -> set[int]:
    """The resource tracker and the fork server live as long as Python; what the fork server started is ours."""
    commands = {pid: command for pid in _children_of("self") if (command := _command(pid)) is not None}
    servers = {pid for pid, command in commands.items() if b"multiprocessing.forkserver" in command}
    trackers = {pid for pid, command in commands.items() if b"resource_tracker" in command}
    return (set(commands) - servers - trackers).union(*(_children_of(pid) for pid in servers))


def _children_of(pid: int | str) -> set[int]:
    pids: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that just ended
            pids |= {int(pid) for pid in (task / "children").read_text().split()}
    return pids


def _command(pid: int) -> bytes | None:
    """None if the process is gone; a zombie has an empty one."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None


def _shared_memory() -> set[str]:
    """Without multiprocessing's semaphores: a framework's or compiler's live as long as its process."""
    entries = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {entry for entry in entries if not entry.startswith("sem.mp-")}
