"""Gloo's collectives with the dead named: gloo says that a connection was closed, but not whose."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradsync.errors import PeerLost
from gradsync.transport.lane import Lane

_NO_TIMEOUT = timedelta(0)
_TRANSPORT = "gloo/transport"  # in what gloo says when a connection failed, and in nothing that a caller did wrong


class Witness:
    """Finds out who is gone when gloo fails."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def named(self, what: str, error: RuntimeError) -> RuntimeError:
        """The error to raise: who was lost, or gloo's own if nobody was."""
        if _TRANSPORT not in str(error):
            return error
        try:
            self._lane.name_lost(what, error)
        except PeerLost as lost:
            return lost
        return error


class WitnessedWork(dist.Work):
    """A work of gloo whose wait names the dead; all else is the work's own."""

    def __init__(self, work: dist.Work, what: str, witness: Witness) -> None:
        super().__init__()
        self._work = work
        self._what = what
        self._witness = witness

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        return self._heard(lambda: self._work.wait(timeout))

    def synchronize(self) -> None:
        self._heard(self._work.synchronize)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return self._work.result()

    def source_rank(self) -> int:
        return self._work.source_rank()

    def _source_rank(self) -> int:
        return self._work._source_rank()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._work.get_future()

    def get_future_result(self) -> torch.futures.Future[Any]:
        return self._work.get_future_result()  # type: ignore[attr-defined]  # missing in the stubs

    def block_current_stream(self) -> None:
        self._work.block_current_stream()

    def _heard(self, wait: Callable[[], Any]) -> Any:
        try:
            return wait()
        except RuntimeError as error:
            raise self._witness.named(self._what, error) from error
