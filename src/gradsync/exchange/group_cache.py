"""A cache of what single tensors need: one lane per process group, made by the first call, kept while it lives.

`gs.all_reduce` and `gs.shared_empty` may be called without any model attached. The first call on a group makes
groups of our own for it, as `attach` does, so nothing we send can meet what the user sends.
"""

from __future__ import annotations

import threading
import weakref

import torch
import torch.distributed as dist

from gradsync.algorithms.price import Algorithm
from gradsync.compress.recipe import Compressor
from gradsync.exchange.choose_route import ExactSum
from gradsync.exchange.compressed_sum import CompressedSum
from gradsync.exchange.pipeline import Pipeline
from gradsync.plan.guard import Guard
from gradsync.plan.sync_plan import Plan
from gradsync.transport.groups import group_timeout
from gradsync.transport.lane import Lane, open_lane

LABEL_NBYTES = 64
_MAX_COMPRESSED = 16  # recipes whose buffers are kept for the next call


class GroupCache:
    """The lane of one process group, and the ways that were asked for so far."""

    def __init__(self, parent: dist.ProcessGroup) -> None:
        self.lane = open_lane(parent, Guard(), group_timeout(parent))
        self.lane.open_team(LABEL_NBYTES)
        self.turn = threading.Lock()  # calls of several threads go one after the other
        self._exacts: dict[tuple[torch.device, Algorithm | None], ExactSum] = {}
        self._compressed: dict[tuple[torch.device, Algorithm | None, Compressor], CompressedSum] = {}
        self._pipelines: dict[torch.device, Pipeline] = {}

    def exact(self, parent: dist.ProcessGroup, device: torch.device, algorithm: Algorithm | None) -> ExactSum:
        """Return what sums tensors on this device; every rank asks for the same, at once."""
        key = (device, algorithm)
        if key not in self._exacts:
            self._exacts[key] = ExactSum(self.lane, parent, algorithm, [device])
        return self._exacts[key]

    def compressed(
        self, parent: dist.ProcessGroup, device: torch.device, algorithm: Algorithm | None, compressor: Compressor
    ) -> CompressedSum:
        """Return what sums tensors on this device compressed; every rank asks for the same, at once."""
        key = (device, algorithm, compressor)
        if key not in self._compressed:
            if len(self._compressed) == _MAX_COMPRESSED:
                del self._compressed[next(iter(self._compressed))]  # on every rank: all are asked for the same
            plan = Plan(algorithm, compressor)
            self._compressed[key] = CompressedSum(self.lane, parent, plan, device, self._pipelines)
        return self._compressed[key]


_making = threading.Lock()
_caches: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupCache] = weakref.WeakKeyDictionary()


def group_cache(group: dist.ProcessGroup) -> GroupCache:
    """Return what stands ready for the members of `group`; every member calls this at once the first time."""
    found = _caches.get(group)
    if found is None:
        with _making:  # threads may come to the first call at once
            found = _caches.get(group)
            if found is None:
                found = _caches[group] = GroupCache(group)
                weakref.finalize(group, _retire, found.lane)
    return found


def _retire(lane: Lane) -> None:
    """The group is gone. What this rank had to say, it has said; if it waits for others, it is left alone."""
    lane.close(together=lane.idle and not lane.groups.on_streams)  # those would have to wait for the other ranks
