"""One pool of rank processes for the whole session, and checks that no test leaves anything behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gradsync.ranks import RankPool
from netlab.fixture import lab, nest  # noqa: F401  # for every folder

Run = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four processes, one thread each, started on first use."""
    with RankPool(4, threads=1) as ranks:
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
    assert _shared_memory() <= shm, f"left in /dev/shm: {_shared_memory() - shm}"


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def _children() -> set[int]:
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that just ended
            pids |= {int(pid) for pid in (task / "children").read_text().split()}
    return {pid for pid in pids if not _is_helper(pid)}


def _is_helper(pid: int) -> bool:
    """Python's own resource tracker lives as long as the process."""
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
