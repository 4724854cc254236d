"""The state behind a DDP hook: buckets come, leave on our lane, and are back when backward has ended.

    backward      │ g g g │ g g g │ g g g │ end │ DDP copies the averages to .grad
    hook          │       │ bucket 0      │ bucket 1
    lane          │       │ ──────────────│ ────────── │
    futures                                            └ completed by `_finish`

Note [Who waits]
    DDP waits for a hook's futures in a callback at the end of backward. Ours is queued from the last bucket's hook,
    just before DDP queues its own, so it runs first, on the same thread and streams: it waits on the lane, with all
    the lane's bounds, and completes the futures. No thread is needed, and an error leaves `backward()` as itself;
    through a future it would arrive as the text of a RuntimeError. Two cases have no such callback, and the last
    bucket's hook itself waits: a static graph, which DDP reduces from inside its own callback, and a rank that has no
    more inputs and shadows the others under `Join`, outside of any backward.
"""

from __future__ import annotations

import json
import warnings
import weakref
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gradsync.checkpoint.format import (
    Arrangement,
    OwnState,
    SavedRunState,
    SharedState,
    State,
    add_up,
    flatten,
    flatten_part,
    flatten_shared,
    shorten,
)
from gradsync.checkpoint.redistribute import changes, gather, receive
from gradsync.compress import toml
from gradsync.engine.bucket import GradEntry
from gradsync.engine.hooks import in_backward, queue_callback
from gradsync.errors import Disagreement, GradSyncError
from gradsync.exchange.means import mean_scale
from gradsync.exchange.residuals import KeptState
from gradsync.exchange.sender import GradientExchange
from gradsync.integrations.ddp_buckets import DDPBucket, DDPBuckets
from gradsync.integrations.hook_agreement import compare
from gradsync.plan.sync_plan import Plan
from gradsync.trace import Recorder
from gradsync.transport.heartbeat import Phase
from gradsync.transport.pending import Pending
from gradsync.transport.shared_memory import LabelsDiffer

_CLOSED = "this DDP hook was closed; wrap the model again and register a new one"
_WINDOW = (
    "this state was saved inside a window of accumulate(k), whose gradients are lost: under DDP there is none. Save "
    "while sync.mid_window is False"
)


class BucketInFlight(NamedTuple):
    """A bucket under way."""

    ddp_bucket: DDPBucket
    buffer: torch.Tensor
    in_flight: list[Pending]
    future: Future[torch.Tensor]


class DDPState:
    """The state of a communication hook; made by `ddp_hook`."""

    def __init__(
        self, plan: Plan, entries: list[GradEntry], opened: GradientExchange, ddp: weakref.ref[DistributedDataParallel]
    ) -> None:
        self.plan = plan
        self._lane, _, self._sender = opened
        self._failing = self._lane.session.failing
        self._ddp = ddp  # weakly: DDP holds us
        self._shapes = {entry.name: tuple(entry.param.shape) for entry in entries}
        self._ddp_buckets = DDPBuckets(entries, opened)
        self._buckets: list[BucketInFlight] = []  # of the step under way
        self._recorder = Recorder()
        self._scale = mean_scale(self._lane.groups.size)
        self._closed = False
        recipe = {"combine": plan.combine, "compress": toml.canonical(plan.compress)}
        self._recipe = shorten(json.dumps(recipe))

    # A step, bucket by bucket

    def launch(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Start a bucket; its future is completed when the averages are there."""
        self._refuse_if_over()
        with self._failing():
            buffer = bucket.buffer()
            self._lane.at(Phase.BACKWARD, bucket.index())
            ddp_bucket = self._ddp_buckets.find(bucket) or self._make(bucket)
            ddp_bucket.pack(buffer, self._scale)
            in_flight = [self._sender.launch(flat_bucket) for flat_bucket in ddp_bucket.flat_buckets]
            future: Future[torch.Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
            self._buckets.append(BucketInFlight(ddp_bucket, buffer, in_flight, future))
            if bucket.is_last():
                self._sender.flush()
                self._finish_after_backward()
        return future

    def _make(self, bucket: GradBucket) -> DDPBucket:
        """A new bucket: what is under way comes to its end first."""
        self._sender.flush()
        self._wait()
        return self._ddp_buckets.make(bucket)

    def _finish_after_backward(self) -> None:
        """Have the end of backward finish the step, or finish it here: see [Who waits]."""
        ddp = self._ddp()
        if in_backward() and not (ddp is not None and ddp.static_graph):
            queue_callback(self._finish)
        else:
            self._finish()

    def _finish(self) -> None:
        with self._failing():
            self._lane.at(Phase.SYNCHRONIZING)
            self._recorder.start_waiting(any(not channel.on_host for channel in self._lane.groups.data.values()))
            self._wait()
            for each in self._buckets:
                each.future.set_result(each.ddp_bucket.unpack(each.buffer))
            in_flight = [pending for each in self._buckets for pending in each.in_flight]
            self._recorder.finish(self._lane.step, in_flight)
            self._buckets = []
            self._lane.session.next_step()

    def _wait(self) -> None:
        try:
            for each in self._buckets:
                for pending in each.in_flight:
                    self._lane.wait(pending)
        except LabelsDiffer as error:
            raise Disagreement(
                f"{self._lane.place()} the ranks of this host came to different sums: {'; '.join(error.labels)}; "
                "every rank must run as many backwards as the others"
            ) from None

    # What it cost, and what is kept

    def stats(self) -> dict[str, float | int | str | None]:
        """Return what the last steps cost: medians, as a flat dict; docs/stats.md explains each key."""
        stats = self._recorder.stats()
        stats["sent_nbytes"], stats["algorithm"] = self._sender.traffic() if stats["nbytes"] else (0, None)
        return stats | self._sender.tally.stats()

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return copies of what compression has not sent yet, by parameter: this rank's share of the mean."""
        return {name: residual.clone() for name, residual in self._sender.kept().residuals.items()}

    def state_dict(self, *, all_ranks: bool = False) -> State:
        """Return what a resumed run needs beside model and optimizer: a flat dict of tensors, local.

        Each rank saves its own, without communication. It has the form of `GradSync.state_dict()`, and either takes
        the other's. With `all_ranks` every rank must call it; rank 0 gets the state of all, in host memory, the others
        an empty dict.
        """
        if all_ranks:
            self._refuse_if_over()
            with self._failing():
                compare(self._lane, "state_dict(all_ranks=True)")
                (rank, part), *_ = (saved := self._saved()).parts.items()
                return gather(self._lane, flatten_shared(saved), flatten_part(rank, part, saved.shared.step))
        return flatten(self._saved())

    def _saved(self) -> SavedRunState:
        kept, size = self._sender.kept(), self._lane.groups.size
        # DDP learns its own order anew in every run.
        arrangement = Arrangement(list(reversed(self._shapes)), [], learned=False)
        shared = SharedState(self._lane.step, size, 1.0, 0, self._recipe, arrangement)
        return SavedRunState(shared, kept.factors, {self._lane.groups.rank: OwnState(kept.residuals, {}, 0)})

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from `state_dict()`; every rank calls it, between two steps, with what it has: its own, or all."""
        self._refuse_if_over()
        with self._failing():
            compare(self._lane, "load_state_dict()")
        keeps = len(self._sender.kept().residuals)
        taken, redistribution = receive(self._lane, state, self._shapes, keeps, self._failing)
        with self._failing():
            self._ddp_buckets.forget()
            self._sender.replace(KeptState(add_up(taken.parts.values()), taken.factors))
            self._lane.session.continue_at(taken.shared.step)
        if self._lane.groups.rank == 0:  # all ranks see the same
            for change in changes(taken, redistribution, self._recipe):
                warnings.warn(f"{self._lane.place()} {change}", stacklevel=2)
            if taken.shared.backwards:
                warnings.warn(f"{self._lane.place()} {_WINDOW}", stacklevel=2)

    def close(self) -> None:
        """Leave: groups and threads end. Every rank calls it; a backward through this hook is then an error."""
        if self._closed:
            return
        together, _ = self._lane.session.goodbye(partial(compare, self._lane, "close()"))
        self._closed = True
        self._ddp_buckets.forget()
        self._lane.close(together)

    # Small things

    def _refuse_if_over(self) -> None:
        if self._closed:
            raise GradSyncError(_CLOSED)
        if self._lane.session.failed is not None:
            raise GradSyncError(f"{self._lane.place()} an earlier synchronization failed; restart the job")
