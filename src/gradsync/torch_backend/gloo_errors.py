"""Gloo's collectives with the dead named: gloo says that a connection was closed, but not whose."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gradsync.errors import PeerLost
from gradsync.torch_backend.works import NO_TIMEOUT, WrappedWork
from gradsync.transport.lane import Lane

_TRANSPORT = "gloo/transport"  # in what gloo says when a connection failed, and in nothing that a caller did wrong


class GlooErrors:
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


class NamingWork(WrappedWork):
    """A work of gloo whose wait names the dead."""

    def __init__(self, work: dist.Work, what: str, gloo_errors: GlooErrors) -> None:
        super().__init__(work)
        self._what = what
        self._gloo_errors = gloo_errors

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return self._naming(lambda: self._work.wait(timeout))

    def synchronize(self) -> None:
        self._naming(self._work.synchronize)

    def _naming(self, wait: Callable[[], Any]) -> Any:
        try:
            return wait()
        except RuntimeError as error:
            raise self._gloo_errors.named(self._what, error) from error
