"""Who looks on while DistributedDataParallel works.

    backward      │ g g g │ g g g │ g g g │ end                │ DDP copies the averages to .grad
    our hook      │       │ bucket 0      │ bucket 1           │
    DDP's group   │       │ ──────────────│ ────────── │       │
    end                                   └ computed           └ averaged

Note [Two callbacks]
    DDP waits for its buckets in a callback at the end of backward, which it queues when the last bucket is full. Ours
    is queued when backward begins, so it runs before: all that this rank computes is done. It queues a second one,
    which runs after DDP's: the averages are there.

Note [The same bits]
    Without a communication hook DDP multiplies each gradient by 1/n while it copies it into a bucket, then adds up.
    Ours multiplies the bucket, then adds up by the same group: every element sees the same two operations. It is put
    in when the first backward begins (DDP itself may put one in during the first forward), and only if there is no
    other: then buckets are not seen, and everything else is.
"""

# No postponed annotations here: DDP reads those of the hook, and wants the types themselves.

import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradsync.engine.bucket import Entry
from gradsync.engine.hooks import Hooks, queue_callback, take_off, weakly
from gradsync.engine.tracing import Tracing
from gradsync.integrations.checks import Checks
from gradsync.policy import Guard
from gradsync.trace import Recorder
from gradsync.trace.lines import BucketPlan, Layout
from gradsync.trace.spans import span
from gradsync.trace.tracer import Trip
from gradsync.transport.lane import Lane

T = TypeVar("T")


class Observer:
    """Made by `observe`; hears the hooks of a DDP model."""

    def __init__(self, ddp: DistributedDataParallel, lane: Lane, entries: list[Entry], guard: Guard) -> None:
        self._ddp = weakref.ref(ddp)  # DDP holds us by its hook
        self._lane = lane
        self._checks = Checks(lane, entries, guard)
        self._entries = entries
        self._indices = {id(entry.param): entry.index for entry in entries}
        self._recorder = Recorder()
        self._tracing: Tracing | None = None
        self._group: dist.ProcessGroup = ddp.process_group
        self._on_device = entries[0].param.is_cuda and dist.get_backend(ddp.process_group) == "nccl"
        self._hooked: bool | None = None  # whether we see buckets; None: not known before the first forward
        self._layout: list[BucketPlan] = []
        self._in_backward = False
        self._fired = False
        self._begin_step()
        self._hooks = Hooks(self, ddp, ())
        self._hooks.listen(entries)
        self._optimizer_hooks: list[RemovableHandle] = [
            register_optimizer_step_pre_hook(weakly(self._before_step)),
            register_optimizer_step_post_hook(weakly(self._after_step)),
        ]
        # DDP keeps us; its parameters may go on without it, in another wrapper.
        weakref.finalize(ddp, take_off, self._hooks.handles, self._optimizer_hooks).atexit = False

    # A copy of the DDP model (an average of weights, torch.save) is not observed.

    def __deepcopy__(self, memo: object) -> "Unobserved":
        return Unobserved()

    def __reduce__(self) -> tuple[type["Unobserved"], tuple[()]]:
        return Unobserved, ()

    def _begin_step(self) -> None:
        self._trips: list[Trip] = []
        self._launched: list[tuple[float, float]] = []  # of each bucket, by the host's clock
        self._synchronizes = True

    def trace(self, tracing: Tracing) -> None:
        """Write down every moment from now on."""
        self._tracing = tracing
        self._recorder.told = tracing.tracer.waited
        self._checks.findings.noted = tracing.tracer.health

    # What a user asks

    def data(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches; with a trace, the time that each takes to come is known exactly as the step's input."""
        return iter(batches) if self._tracing is None else self._tracing.tracer.data(batches)

    def stats(self) -> dict[str, float | int | str | None]:
        """What the last steps cost: medians, as a flat dict; docs/stats.md explains each key."""
        return self._recorder.stats() | self._checks.findings.stats()

    def close(self) -> None:
        """Look on no more; every rank calls it. The communication hook stays, and only averages, as DDP would."""
        take_off(self._hooks.handles, self._optimizer_hooks)
        if self._tracing is not None:
            self._tracing.close()
            self._tracing = None
        self._recorder = Recorder()
        self._lane.close(together=self._checks.said_goodbye())

    # For the hooks

    def before_forward(self) -> None:
        self._in_backward = False  # a backward that raised did not end
        if self._tracing is not None:
            self._tracing.border()
            self._tracing.forward_begins()

    def backward_begins(self) -> None:
        if self._in_backward:
            return
        self._in_backward, self._fired = True, False
        if self._hooked is None:
            self._put_hook_in()
        ddp = self._ddp()
        self._synchronizes = ddp is not None and ddp.require_backward_grad_sync
        # Ranks that are out of data take part in sums, but in nothing of ours.
        self._checks.paused = ddp is None or ddp._join_config.enable
        if self._tracing is not None:
            self._tracing.backward_begins()
        queue_callback(self._computed)

    def arrived(self, entry: Entry, param: torch.Tensor) -> None:
        if not self._in_backward:
            self.backward_begins()
        self._fired = True
        if self._tracing is not None and self._tracing.tracer.each_gradient:
            self._tracing.tracer.arrived(entry.index)

    # Optimizers are heard of by hooks on all of them, `_before_step` and `_after_step`: these are not called.

    def before_step(self, optimizer: Optimizer, closure: bool) -> None: ...

    def closure_ran(self, optimizer: Optimizer) -> None: ...

    def after_step(self, optimizer: Optimizer, closure: bool) -> None: ...

    def _computed(self) -> None:
        """See [Two callbacks]."""
        self._in_backward = False
        if not self._fired:  # torch.autograd.grad: no gradient was accumulated
            return
        if self._tracing is not None:
            self._tracing.backward_ends()
        if self._synchronizes:
            self._checks.announce()
            self._recorder.start_waiting(self._on_device)
            queue_callback(self._averaged)

    def _averaged(self) -> None:
        spans = [(start, stop) for start, stop in self._launched if stop]
        nbytes = sum(trip.nbytes for trip in self._trips)
        self._recorder.finish_step(self._lane.step, spans, nbytes, len(self._trips), None, self._sent(nbytes))
        if self._tracing is not None:
            self._tracing.write_layout(Layout(self._lane.step, self._layout))
            self._tracing.over(self._lane.step, self._trips)
        self._lane.step += 1
        self._begin_step()
        self._checks.hear()

    def _sent(self, nbytes: int) -> int:
        """On a network: what a ring sends, which is how gloo and NCCL sum large buckets; NCCL needs none in a host."""
        size = self._lane.groups.size
        if self._lane.one_host and dist.get_backend(self._group) != "gloo":
            return 0
        return round(2 * (size - 1) / size * nbytes)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_ours(optimizer):
            self._checks.know(optimizer)
            if self._tracing is not None:
                self._tracing.optimizer_begins()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._tracing is not None and self._is_ours(optimizer):
            self._tracing.optimizer_ends()

    def _is_ours(self, optimizer: Optimizer) -> bool:
        """Whether it steps this model; a group of parameters is of one model, so its first tells."""
        return any(id(param) in self._indices for group in optimizer.param_groups for param in group["params"][:1])

    # Buckets: see [The same bits]

    def _put_hook_in(self) -> None:
        ddp = self._ddp()
        self._hooked = ddp is not None and not ddp._comm_hooks
        if ddp is not None and self._hooked:
            ddp.register_comm_hook(self, average_bucket)

    def launch(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """A bucket is full: do what DDP would."""
        buffer, index = bucket.buffer(), bucket.index()
        trip, number = self._trip(bucket), len(self._launched)
        self._launched.append((time.perf_counter(), 0.0))
        self._checks.look_at(bucket)
        with span("launch", index):
            buffer.mul_(1.0 / self._lane.groups.size)
            work = self._group.allreduce([buffer])

        def done(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            # On a GPU this runs at once, on a stream that follows the sum: the moment is an event there.
            if trip.launched is not None and self._tracing is not None:
                trip.done = trip.wait_to = self._tracing.tracer.timer.now()
            if number < len(self._launched) and not self._on_device:
                self._launched[number] = (self._launched[number][0], time.perf_counter())
            return future.value()[0]

        return work.get_future().then(done)

    def _trip(self, bucket: GradBucket) -> Trip:
        buffer, index = bucket.buffer(), bucket.index()
        nbytes = buffer.numel() * buffer.element_size()
        now = None if self._tracing is None else self._tracing.tracer.detail()
        trip = Trip(index, nbytes, now, now)
        self._trips.append(trip)
        if self._tracing is not None:
            self._tracing.tracer.left(index)
            if index >= len(self._layout) or self._layout[index].nbytes != nbytes:
                self._note_layout(bucket, nbytes)
        return trip

    def _note_layout(self, bucket: GradBucket, nbytes: int) -> None:
        """DDP lays its buckets out anew after the first step."""
        parameters = [self._indices[id(param)] for param in bucket.parameters() if id(param) in self._indices]
        plan = BucketPlan(bucket.index(), parameters, nbytes, None)
        kept = [each for each in self._layout if each.bucket != plan.bucket and not {*each.parameters} & {*parameters}]
        self._layout = sorted([*kept, plan])


class Unobserved:
    """The communication hook's state in a copy of an observed model: what DDP does by itself."""

    def launch(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]


def average_bucket(observer: Observer | Unobserved, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook."""
    return observer.launch(bucket)
