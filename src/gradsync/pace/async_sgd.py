"""Asynchronous SGD as a pace: a backward pushes, the next forward pulls; what happens between is in `asynchronous/`."""

from __future__ import annotations

import contextlib

import torch.distributed as dist

from gradsync.errors import GradSyncError
from gradsync.pace.asynchronous import Asynchronous
from gradsync.pace.contract import Pace, Saved, Site, Stats
from gradsync.paces import AsyncSGD
from gradsync.transport.lane import NET_S

_CHANNEL = "shards"


class Async(Pace):
    """`async_sgd(max_staleness)` at work."""

    replicas_differ = True

    def __init__(self, pace: AsyncSGD, site: Site, parent: dist.ProcessGroup, timeout: float) -> None:
        """Every rank makes it at once, with equal parameters; `timeout` bounds every wait."""
        groups = site.lane.groups
        groups.add_part(parent, _CHANNEL, list(range(groups.size)), "cpu", timeout + NET_S)
        trained = [(name, param) for name, param in site.parameters if param.requires_grad]
        self._lane, self._trained = site.lane, trained
        self._workers = Asynchronous(site.lane, groups.data[_CHANNEL], trained, site.optimizers, pace, timeout)
        self._has_pushed = False  # since the last read
        self._is_level = True  # nobody has pushed since all met

    @property
    def mid_window(self) -> bool:
        return not self._is_level

    def before_forward(self) -> None:
        if self._has_pushed:
            self._has_pushed = False
            self._workers.pull()

    def before_backward(self) -> None:
        if self._has_pushed:
            raise GradSyncError(
                f"{self._lane.place()} parameters were to be read before this forward, which gradsync did not see: "
                "call the model itself, not its parts, once for every backward"
            )

    def after_backward(self, count: int, aborted: bool) -> bool:
        if aborted:  # a push of nothing, so that nobody waits for it
            for _, param in self._trained:
                param.grad = None
        self._workers.push()
        self._lane.step = self._workers.clock
        self._has_pushed, self._is_level = True, False
        return False

    def drain(self) -> bool:
        self._workers.drain()
        self._lane.step = self._workers.clock
        self._has_pushed, self._is_level = False, True
        return False

    def stats(self) -> Stats:
        return self._workers.stats()

    def state(self) -> Saved:
        return Saved({}, self._workers.state())

    def load(self, saved: Saved) -> None:
        if saved.own:
            self._workers.load(saved.own)
        else:
            self.reset()

    def reset(self) -> None:
        self._workers.restart()
        self._has_pushed, self._is_level = False, True

    def close(self, together: bool) -> None:
        with contextlib.suppress(GradSyncError):  # a rank that is gone now can spoil nothing any more
            self._workers.close(together)
