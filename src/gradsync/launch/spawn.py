"""Ranks as processes of this machine: for trying out, demos and tests.

A `RankPool` starts its processes once and hands them function after function; `spawn` is a pool used
once. Each function runs with a gloo group on loopback already made, over a file store of its own, so no
port is guessed and two pools never meet.

Processes are started fresh ("spawn"), never forked from this one: a fork of a process whose OpenMP pool has run
deadlocks in its first parallel operation. So `fn` must be importable by name. Who starts many, as tests do, may give a
pool the context of a fork server that has imported torch and never computed: a rank then starts in a moment.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from gradsync.errors import GradSyncError
from gradsync.launch.shared_gpus import check_nccl_ranks, take_gpu
from gradsync.transport.awake_clock import AwakeClock
from gradsync.transport.host_processes import remember

_HOLD_S = 1.0  # a rank that failed lives on this long, so that peers can read what it sent before
_ANSWER_S = 5.0  # for the rest of an answer, when its rank has ended
_SLICE_S = 0.25
_GRACE_S = 20.0  # after a failure the others have this long to fail too; longer than Guard.dead_after


class RankFailed(GradSyncError):
    """One or more ranks raised, died or did not finish; the message holds every rank's traceback."""


class RankOutcome(NamedTuple):
    """The end of a rank: with a value, a traceback, or an exit code."""

    ok: bool
    value: Any
    text: str


class RankPool:
    """A set of processes, started once, that run functions as ranks of a fresh group.

    Use it as a context manager; after a failure the processes of that run are replaced. `context` says how processes
    start: each on its own, unless told otherwise. Those of a fork server have its environment, not this process's;
    `env` is added to it. With `nccl` each rank has a GPU, in turn, and NCCL serves it, also where ranks share one.
    """

    def __init__(
        self,
        ranks: int,
        threads: int | None = None,
        context: SpawnContext | ForkServerContext | None = None,
        nccl: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if ranks < 1:
            raise ValueError(f"a pool needs at least 1 rank, got {ranks}")
        if nccl:
            check_nccl_ranks(ranks)
        self.ranks = ranks
        self._nccl, self._env = nccl, dict(env or {})
        self._threads = threads
        self._context = context or multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="gradsync-ranks-")
        self._workers: list[_Worker | None] = [None] * ranks
        self._runs = 0

    def run(self, fn: Callable[..., Any], *args: Any, ranks: int | None = None, timeout: float = 60) -> list[Any]:
        """Each rank's return value of `fn(*args)`; every rank's traceback if any fails."""
        outcomes = self.outcomes(fn, *args, ranks=ranks, timeout=timeout)
        if all(outcome.ok for outcome in outcomes):
            return [outcome.value for outcome in outcomes]
        report = "\n".join(f"--- rank {rank} ---\n{outcome.text}" for rank, outcome in enumerate(outcomes))
        failed = [rank for rank, outcome in enumerate(outcomes) if not outcome.ok]
        raise RankFailed(f"{len(failed)} of {len(outcomes)} ranks failed: {failed}\n{report}")

    def outcomes(
        self, fn: Callable[..., Any], *args: Any, ranks: int | None = None, timeout: float = 60
    ) -> list[RankOutcome]:
        """Return how each rank ended; nothing is raised for those that failed."""
        world_size = self.ranks if ranks is None else ranks
        if not 1 <= world_size <= self.ranks:
            raise ValueError(f"this pool has {self.ranks} ranks, asked for {world_size}")
        self._runs += 1
        store = str(Path(self._folder.name) / f"store-{self._runs}")
        threads = self._threads or max(1, (os.cpu_count() or 1) // world_size)
        workers = [self._worker(rank) for rank in range(world_size)]
        pids = [worker.pid for worker in workers]
        for rank, worker in enumerate(workers):
            worker.send((fn, args, rank, pids, store, threads, self._nccl, self._env))
        return self._collect(workers, timeout)

    def pids(self) -> list[int]:
        """The processes of the ranks, started if they were not."""
        return [self._worker(rank).pid for rank in range(self.ranks)]

    def close(self) -> None:
        """End every process of the pool and wait for it."""
        for worker in self._workers:
            if worker is not None:
                worker.end()
        self._workers = [None] * self.ranks
        self._folder.cleanup()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            # After Ctrl-C nobody wants to wait for ranks that are still at work.
            for worker in self._workers:
                if worker is not None:
                    worker.kill()
            self._workers = [None] * self.ranks
        self.close()

    def _worker(self, rank: int) -> _Worker:
        worker = self._workers[rank]
        if worker is not None and not worker.alive:
            worker.kill()
            worker = None
        if worker is None:
            worker = self._workers[rank] = _Worker(rank, self._folder.name, self._context)
        return worker

    def _collect(self, workers: list[_Worker], timeout: float) -> list[RankOutcome]:
        """Wait for all; once one failed the others get a while to fail by themselves."""
        bound = AwakeClock(timeout)
        outcomes: dict[int, RankOutcome] = {}
        while len(outcomes) < len(workers) and (left := bound.left()) > 0:
            pending = [rank for rank in range(len(workers)) if rank not in outcomes]
            ready = wait([h for r in pending for h in workers[r].handles()], timeout=min(left, _SLICE_S))
            for rank in pending:
                if any(handle in ready for handle in workers[rank].handles()):
                    outcomes[rank] = workers[rank].outcome()
                    if not outcomes[rank].ok:
                        bound.shorten(_GRACE_S)
        waited = bound.look()
        for rank, worker in enumerate(workers):
            if rank not in outcomes:
                text = f"did not finish within {waited:.0f} s; its stacks:\n{worker.stacks()}"
                outcomes[rank] = RankOutcome(False, None, text)
        if not all(outcome.ok for outcome in outcomes.values()):
            # A rank that failed may hold half-dead groups: none of them is used again.
            for rank, worker in enumerate(workers):
                worker.kill()
                self._workers[rank] = None
        return [outcomes[rank] for rank in range(len(workers))]


def spawn(fn: Callable[..., Any], ranks: int, *args: Any, timeout: float = 60, nccl: bool = False) -> list[Any]:
    """Run `fn(*args)` on `ranks` new processes of this machine; return each rank's value.

    The group exists when `fn` starts: `torch.distributed.get_rank()` tells the rank, `gs.init()` adopts it. Each
    process gets cores / ranks threads. What is in `args` is each rank's own, tensors too: it may write to them. If a
    rank fails, `RankFailed` shows every rank's traceback; after `timeout` seconds all are ended, and it shows where
    each was. `nccl=True` gives each a GPU, in turn, over NCCL: where ranks share one it shows what NCCL does, not how
    fast NVLink is.
    """
    if not callable(fn):
        raise TypeError(f"spawn takes a function, got {fn!r}")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks must be a whole number of at least 1, got {ranks!r}")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < 1e9:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
    with RankPool(ranks, nccl=nccl) as pool:
        return pool.run(fn, *args, timeout=timeout)


class _Worker:
    """The parent's end of one process."""

    def __init__(self, rank: int, folder: str, context: SpawnContext | ForkServerContext) -> None:
        self._connection, theirs = context.Pipe()
        self._job_thread: _JobThread | None = None
        self._stacks = Path(folder) / f"stacks-{rank}-{time.monotonic_ns()}"
        self._process = context.Process(target=_serve, args=(theirs, str(self._stacks)), name=f"gradsync-rank-{rank}")
        with _interrupts_held():
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def send(self, job: tuple[Any, ...]) -> None:
        """Run a job; a thread sends it and receives the answer, as a pipe makes both wait for the other end."""
        try:
            content = _ByValue.dumps(job, pickle.HIGHEST_PROTOCOL)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise ValueError(
                f"{job[0]!r} cannot reach the ranks ({error}): define it at the top of a module, "
                "since every rank is a new process that imports it"
            ) from None
        self._job_thread = _JobThread(self._connection, content)

    def handles(self) -> list[Any]:
        assert self._job_thread is not None
        return [self._job_thread.over, self._process.sentinel]

    def outcome(self) -> RankOutcome:
        """Return how the process ended: by what it said last, or by its exit code."""
        assert self._job_thread is not None
        if (answer := self._job_thread.answer()) is not None:
            return answer
        self._process.join(_ANSWER_S)
        code = self._process.exitcode
        if code is None:
            return RankOutcome(False, None, "the process has hung up and does not end")
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return RankOutcome(False, None, f"the process was {how}" if code < 0 else f"the process {how}")

    def stacks(self) -> str:
        """Every thread's Python stack, written by the process itself on SIGUSR1."""
        with suppress(ProcessLookupError):  # a fork server has seen it end before we could
            os.kill(self.pid, signal.SIGUSR1)
        bound = AwakeClock(2)
        while not bound.over():
            if self._stacks.exists() and self._stacks.stat().st_size > 0:
                time.sleep(0.1)
                return self._stacks.read_text()
            time.sleep(0.02)
        return "(the process did not answer)"

    def end(self) -> None:
        self._connection.close()
        self._process.join(5)
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        if self._job_thread is not None:
            self._job_thread.answer()  # which ends, as the other end of its pipe has
        self._connection.close()


class _ByValue(ForkingPickler):
    """Tensors as what they hold: torch's own way is one memory for all processes. What shares a storage still does."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, torch.Tensor):
            return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(value, torch.UntypedStorage):
            held = torch.empty(0, dtype=torch.uint8, device=value.device).set_(value)
            return _storage_of, (held.numpy(force=True), value.device)
        return NotImplemented


def _storage_of(held: Any, device: torch.device) -> torch.UntypedStorage:
    return torch.from_numpy(held).clone().to(device).untyped_storage()


class _JobThread:
    """A job on its way to a process, and the answer on its way back."""

    def __init__(self, connection: Connection, job: memoryview) -> None:
        self.over, self._done = multiprocessing.Pipe(duplex=False)  # `over` is readable when it has ended
        self._answer: RankOutcome | None = None
        self._thread = threading.Thread(target=self._run, args=(connection, job), name="gradsync-talk", daemon=True)
        self._thread.start()

    def answer(self) -> RankOutcome | None:
        """The answer; None if the process ended without. Not waited for for ever: its children may hold the pipe."""
        self._thread.join(_ANSWER_S)
        self.over.close()
        return self._answer

    def _run(self, connection: Connection, job: memoryview) -> None:
        try:
            connection.send_bytes(job)
            self._answer = RankOutcome(*connection.recv())
        except (EOFError, OSError):
            pass
        except Exception as error:
            self._answer = RankOutcome(False, None, f"what it returned cannot be read here: {error}")
        finally:
            self._done.close()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C reaches every process of a terminal; a rank that is born with it blocked does not answer it.

    Blocked, not ignored: one that comes just now is delivered to this process afterwards, not lost. The resource
    tracker, which the first process would start, unblocks it again: so it is started before.
    """
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection, stacks: str) -> None:
    """The life of a worker process: take a job, answer, until the parent hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="watch-parent", daemon=True).start()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        while True:
            try:
                job = connection.recv()
            except (EOFError, OSError):
                return
            except Exception:
                connection.send((False, None, traceback.format_exc()))
                return
            answer = _run(*job)
            try:
                connection.send(answer)
            except Exception as error:
                answer = (False, None, f"the value that {job[0].__name__} returned cannot be sent back: {error}")
                connection.send(answer)
            if not answer[0]:
                # Its end is what makes those fail that wait for it.
                time.sleep(_HOLD_S)
                os._exit(1)


def _end_with_parent() -> None:
    """A rank is of no use to anybody when its parent was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    pids: list[int],
    store: str,
    threads: int,
    nccl: bool,
    env: dict[str, str],
) -> tuple[bool, Any, str]:
    torch.set_num_threads(threads)
    world_size = len(pids)
    os.environ.update(env)
    try:
        if dist.is_initialized():
            where = "the script" if fn.__module__ == "__mp_main__" else fn.__module__
            raise RuntimeError(
                f"{where} made a process group when this rank imported it, and spawn makes one: keep gs.init() and "
                'what follows it below `if __name__ == "__main__":`, or in a function'
            )
        if nccl:
            take_gpu(rank, world_size)
        dist.init_process_group(
            f"cpu:gloo,cuda:{'nccl' if nccl else 'gloo'}" if torch.cuda.is_available() else "gloo",
            store=FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        # While all are there: who is killed before it has met the others in `attach` is named by them at once.
        for other, pid in enumerate(pids):
            remember(other, pid)
        # Nobody may be done, and close its connections, before everybody has them.
        dist.barrier()
        value = fn(*args)
        if dist.is_initialized():  # `fn` may have ended it itself
            dist.destroy_process_group()
    except BaseException:
        # Not destroyed: a group with a collective under way blocks in its destructor.
        return False, None, traceback.format_exc()
    return True, value, "returned"
