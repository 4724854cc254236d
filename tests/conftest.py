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
import torch
from hypothesis import settings

from gradsync.launch.spawn import RankPool
from in_a_tree import in_its_tree
from nccl_ranks import NcclRanks
from netlab.fixture import fork_server, lab  # noqa: F401  # for every folder
from on_gpu import on_gpu
from warm_processes import WarmContext

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
    context = WarmContext()
    context.set_forkserver_preload(["torch._dynamo", "gradsync", "pytest", "hypothesis"])
    forkserver.ensure_running()  # now, with an environment that no test has changed
    return context


@pytest.fixture(scope="session")
def pool(warm: ForkServerContext) -> Iterator[RankPool]:
    """Four processes, one thread each, started on first use; a lost one is replaced in a moment."""
    with RankPool(4, threads=1, context=warm) as ranks:
        yield ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nccl", action="store_true", help="run every test's ranks on GPUs, over NCCL")
    parser.addoption("--tree", action="store_true", help="run every test's ranks as hosts of a small control tree")


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Run:
    """`run(fn, *args, ranks=2)`: each rank's value of `fn(*args)`; every rank's traceback if one fails."""
    if request.config.getoption("--nccl"):
        over_nccl = request.getfixturevalue("nccl")
        return lambda fn, *args, **options: over_nccl(on_gpu, fn, *args, **options)
    pool: RankPool = request.getfixturevalue("pool")
    tree = request.config.getoption("--tree")

    def run_ranks(fn: Callable[..., Any], *args: Any, ranks: int = 2, timeout: float = 60) -> list[Any]:
        fn, args = (in_its_tree, (fn, *args)) if tree else (fn, args)
        return pool.run(fn, *args, ranks=ranks, timeout=timeout)

    return run_ranks


@pytest.fixture(scope="session")
def nccl_ranks() -> Iterator[NcclRanks]:
    """Four processes over NCCL, on as many GPUs as there are."""
    ranks = NcclRanks()
    yield ranks
    ranks.close()


@pytest.fixture
def nccl(nccl_ranks: NcclRanks) -> Run:
    """`nccl(fn, *args, ranks=2)`: as `run`, over NCCL with a GPU for each rank, shared where there are fewer."""
    if not torch.cuda.is_available():
        pytest.skip("There is no GPU on this machine.")
    return nccl_ranks.run


@pytest.fixture
def nccl_alone() -> Run:
    """`nccl_alone(fn, *args, ranks=2)`: how each of fresh ranks over NCCL ended, any of which may be killed.

    They share the GPU in time slices: a kill would make MPS unusable for everybody.
    """
    if not torch.cuda.is_available():
        pytest.skip("There is no GPU on this machine.")

    def run_ranks(fn: Callable[..., Any], *args: Any, ranks: int = 2, timeout: float = 60) -> list[Any]:
        with RankPool(ranks, threads=1, nccl=True) as fresh:
            return fresh.outcomes(fn, *args, timeout=timeout)

    return run_ranks


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Threads, child processes and shared memory are as before, the session's pool apart."""
    threads, children, shm = _threads(), _children(), _shared_memory()
    yield
    pool_children = set()
    if {"pool", "nccl_ranks"} & set(request.fixturenames):
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
    """The resource tracker, the fork server and MPS live as long as Python; what the fork server started is ours."""
    commands = {pid: command for pid in _children_of("self") if (command := _command(pid)) is not None}
    servers = {pid for pid, command in commands.items() if b"multiprocessing.forkserver" in command}
    helpers = (b"resource_tracker", b"nvidia-cuda-mps-control")
    trackers = {pid for pid, command in commands.items() if any(name in command for name in helpers)}
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
