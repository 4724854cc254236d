"""Ranks over NCCL for tests, however few GPUs there are; made anew after a test that failed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from gradsync.errors import LaunchError
from gradsync.launch.shared_gpus import Mps
from gradsync.launch.spawn import RankFailed, RankPool

RANKS = 4


class NcclRanks:
    """A pool that starts on first use, under MPS where it can be had and the ranks share GPUs."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._pool: RankPool | None = None

    def run(self, fn: Callable[..., Any], *args: Any, ranks: int = 2, timeout: float = 60) -> list[Any]:
        """Each rank's value of `fn(*args)`.

        A rank that fails is killed, and a server of which a client is killed may serve nobody any more.
        """
        self._pool = self._pool or self._open()
        try:
            return self._pool.run(fn, *args, ranks=ranks, timeout=timeout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._pool = None
        self._stack.close()

    def _open(self) -> RankPool:
        if torch.cuda.device_count() < RANKS:
            try:
                pool = self._enter(self._stack.enter_context(Mps()).environment)
                pool.run(met, timeout=120)
                return pool
            except (LaunchError, RankFailed):
                self._stack.close()  # time slices will do
        return self._enter({})

    def _enter(self, env: dict[str, str]) -> RankPool:
        return self._stack.enter_context(RankPool(RANKS, threads=1, nccl=True, env=env))


def met() -> int:
    """The sum of ones over the ranks, on their GPUs."""
    ones = torch.ones(1, device="cuda")
    dist.all_reduce(ones)
    return int(ones)
