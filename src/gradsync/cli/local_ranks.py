"""The ranks that a command works with, and how far they are.

    gradsync bench --ranks 4                                    starts ranks here and waits for them
    torchrun --nproc-per-node 4 --no-python gradsync bench      is a rank itself

A rank appends a byte per step to a file in a folder of the command, which looks at its size. A file needs no connection
that could break or block: a rank that is killed leaves a shorter file, no more.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gradsync.cli.gpu_option import shared_gpus
from gradsync.launch.spawn import RankPool

T = TypeVar("T")

_LOOK_S = 0.2

Show = Callable[[int], None]
Tick = Callable[[str], None]  # is told the name of a stage that is over
Measure = Callable[[dist.ProcessGroup, Tick], T]


@contextmanager
def local_ranks(
    ranks: int, threads: int, total: int, title: str, quiet: bool, share_gpus: bool = False, mps: bool = True
) -> Iterator[tuple[RankPool, str]]:
    """A pool, and a folder for what its ranks write; both are gone afterwards, whatever happens."""
    with ExitStack() as stack:
        env = stack.enter_context(shared_gpus(ranks, quiet, mps)) if share_gpus else {}
        folder = stack.enter_context(rank_folder(total, title, quiet))
        yield stack.enter_context(RankPool(ranks, threads, nccl=share_gpus, env=env)), folder


def measure_alone(
    measure: Measure[T], ranks: int, num_stages: int, quiet: bool, timeout: float, share_gpus: bool = False
) -> T:
    """Rank 0's value of `measure(group, tick)` on ranks of this machine, each with one thread."""
    with local_ranks(ranks, 1, num_stages, "measuring", quiet, share_gpus) as (pool, folder):
        measured: T = pool.run(_take_part, measure, folder, timeout=timeout)[0]
        return measured


def measure_as_rank(measure: Measure[T], num_stages: int, quiet: bool) -> T:
    """The value of `measure(group, tick)` in the default group, which exists."""
    if dist.get_rank() != 0:
        return _take_part(measure, "")
    with rank_folder(num_stages, "measuring", quiet) as folder:
        return _take_part(measure, folder)


def _take_part(measure: Measure[T], folder: str) -> T:
    world = dist.group.WORLD
    assert world is not None
    return measure(world, partial(_tick, folder if dist.get_rank() == 0 else ""))


def _tick(folder: str, stage: str) -> None:
    if folder:
        advance(folder)


def advance(folder: str) -> None:
    """Note that one step more is done."""
    with open(_progress(folder), "ab") as file:
        file.write(b".")


@contextmanager
def rank_folder(total: int, title: str, quiet: bool = False) -> Iterator[str]:
    """A folder for ranks to write into; meanwhile show how far they are: a bar on a terminal, else a few lines.

    On stderr, so that stdout holds only the result. `quiet` leaves out the lines, not the bar.
    """
    console = Console(stderr=True)
    show_as = _bar(console, total, title) if console.is_terminal else _lines(total, title, quiet)
    with tempfile.TemporaryDirectory(prefix="gradsync-") as folder, show_as as show:
        stop = threading.Event()
        thread = threading.Thread(target=_poll, args=(folder, show, stop), name="gradsync-progress", daemon=True)
        thread.start()
        try:
            yield folder
        finally:
            stop.set()
            thread.join()


def _progress(folder: str) -> Path:
    return Path(folder) / "progress"


def _poll(folder: str, show: Show, stop: threading.Event) -> None:
    while not stop.wait(_LOOK_S):
        show(_steps(folder))
    show(_steps(folder))


def _steps(folder: str) -> int:
    try:
        return _progress(folder).stat().st_size
    except FileNotFoundError:
        return 0


@contextmanager
def _bar(console: Console, total: int, title: str) -> Iterator[Show]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def _lines(total: int, title: str, quiet: bool) -> Iterator[Show]:
    shown = -1

    def show(done: int) -> None:
        nonlocal shown
        quarter = 4 * done // total
        if quarter > shown and not quiet:
            shown = quarter
            print(f"{title}: {done} of {total}", file=sys.stderr, flush=True)

    yield show
