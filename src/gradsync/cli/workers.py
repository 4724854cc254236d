"""Rank processes for a command: Ctrl-C ends them at once, and they do not answer it themselves."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from gradsync.ranks import RankPool


@contextmanager
def workers(ranks: int, threads: int) -> Iterator[RankPool]:
    """A pool whose processes are gone afterwards, whatever happens."""
    others = set(multiprocessing.active_children())
    with RankPool(ranks, threads) as pool:
        try:
            start(pool)
            yield pool
        except BaseException:
            # A pool waits for ranks that are at work; after Ctrl-C nobody wants their work any more.
            for child in set(multiprocessing.active_children()) - others:
                child.kill()
            raise


def start(pool: RankPool) -> None:
    """Start the processes that are not running.

    Ctrl-C reaches every process of the terminal. One that is born with it ignored stays silent, even while
    it still imports; otherwise each would print a traceback.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        pool.pids()
    finally:
        signal.signal(signal.SIGINT, before)
