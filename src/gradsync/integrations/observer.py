"""The observer of a DistributedDataParallel model at work.

    backward      │ g g g │ g g g │ g g g │ end                │ DDP copies the averages to .grad
    DDP's group   │       │ ──────────────│ ────────── │       │
    we            └ begins  └ bucket 0 left              └ computed           └ averaged

Note [Two callbacks]
    DDP waits for its buckets in a callback at the end of backward, which it queues when the last bucket is full. Ours
    is queued when backward begins, so it runs before: all that this rank computes is done. It queues a second one,
    which runs after DDP's: the averages are there.

Note [Nothing of DDP is touched]
    Hooks on the wrapper, its parameters and its output tell when; none of DDP's own is registered, nothing of it is
    replaced, and its process group carries nothing of ours. So DDP does what it would do, whatever it is asked for:
    bits, calls and errors are its own. What goes wrong here ends the watching, with a sentence, and not the training.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradsync.engine.bucket import GradEntry
from gradsync.engine.hooks import HookListener, Hooks, queue_callback, take_off, weakly
from gradsync.engine.trace_step import Tracing
from gradsync.errors import Disagreement
from gradsync.integrations.bucket_launches import BucketLaunches
from gradsync.integrations.observe_checks import ObserverChecks, say
from gradsync.integrations.replaced_parameters import describe_replaced, follow_parameters
from gradsync.plan.guard import Guard
from gradsync.trace import Recorder
from gradsync.trace.lines import BucketLayout, Health
from gradsync.trace.timers import Moment
from gradsync.trace.tracer import BucketMoments
from gradsync.transport.lane import Lane
from gradsync.transport.session import Position

T = TypeVar("T")
P = ParamSpec("P")


def _harmless(method: Callable[Concatenate[Observer, P], None]) -> Callable[Concatenate[Observer, P], None]:
    """Let what a method raises end the observer, not the training: see [Nothing of DDP is touched]."""

    @functools.wraps(method)
    def call(self: Observer, *args: P.args, **kwargs: P.kwargs) -> None:
        if self._over:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            if self._strict and isinstance(error, Disagreement):
                raise
            self._end(error)

    return call  # type: ignore[return-value]  # wrapped, it is one


class Observer(HookListener):
    """Made by `observe`; hears the hooks of a DDP model."""

    def __init__(self, ddp: DistributedDataParallel, entries: list[GradEntry], guard: Guard, lane: Lane | None) -> None:
        """An observer without a lane knows nothing of other ranks, and tells only what the steps cost this one."""
        self._ddp = weakref.ref(ddp)  # its hooks hold us
        self._lane = lane
        self._checks = None if lane is None else ObserverChecks(lane, entries, guard)
        self._strict = guard.drift in ("repair", "raise")  # the user wants to be stopped
        self._entries = entries
        self._indices = {id(entry.param): entry.index for entry in entries}
        self._recorder = Recorder()
        self._tracing: Tracing | None = None
        self._launches = BucketLaunches(entries, self._launched)
        backend = dist.get_backend(ddp.process_group)
        self._on_device = entries[0].param.is_cuda and backend == "nccl"
        self._uses_sockets = backend == "gloo"
        self._late = ddp.mixed_precision is not None  # parameters are back in full precision after DDP's callback
        self._size = dist.get_world_size(ddp.process_group)
        self._position = Position(dist.get_rank(), self._size) if lane is None else lane.session
        self._over = False
        self._in_backward = self._fired = self._synchronizes = False
        self._begin_step()
        self._hooks = Hooks(self, ddp, ())
        self._hooks.listen(entries)
        self._optimizer_hooks: list[RemovableHandle] = [
            register_optimizer_step_pre_hook(weakly(self._before_step)),
            register_optimizer_step_post_hook(weakly(self._after_step)),
        ]
        # DDP keeps us; its parameters may go on without it, in another wrapper.
        weakref.finalize(ddp, take_off, self._hooks.handles, self._optimizer_hooks).atexit = False

    def _begin_step(self) -> None:
        self._buckets: list[BucketMoments] = []
        self._first_launch: float | None = None  # by the host's clock
        self._computed_at: Moment | None = None
        self._launches.begin()

    def trace(self, tracing: Tracing) -> None:
        """Write down every moment from now on."""
        self._tracing = tracing
        tracing.tracer.ask(self.stats)
        self._recorder.tell(tracing.tracer.waited)
        if self._checks is not None:
            self._checks.health_log.listen(tracing.tracer.health)

    # What a user asks

    def data(self, batches: Iterable[T]) -> Iterator[T]:
        """These batches; with a trace, the time that each takes to come is known exactly as the step's input."""
        return iter(batches) if self._tracing is None else self._tracing.tracer.data(batches)

    def stats(self) -> dict[str, float | int | str | None]:
        """Return what the last steps cost: medians, as a flat dict; docs/stats.md explains each key."""
        found = {"skipped_steps": 0, "drift_findings": 0} if self._checks is None else self._checks.health_log.stats()
        return self._recorder.stats() | found

    def close(self) -> None:
        """Look on no more; every rank calls it."""
        self._over = True
        take_off(self._hooks.handles, self._optimizer_hooks)
        if self._tracing is not None:
            self._tracing.close()
            self._tracing = None
        self._recorder = Recorder()
        if self._lane is not None and self._checks is not None:
            self._lane.close(together=self._checks.goodbye())
            self._lane = self._checks = None

    # For the hooks

    @_harmless
    def before_forward(self) -> None:
        self._in_backward = False  # a backward that raised did not end
        if any(entry.owner.get(entry.key) is not entry.param for entry in self._entries):
            self._follow_replaced()
        if self._tracing is not None:
            self._tracing.border()
            self._tracing.tracer.forward_begins()

    @_harmless
    def backward_begins(self) -> None:
        if self._in_backward:
            return
        self._in_backward, self._fired = True, False
        ddp = self._ddp()
        self._synchronizes = ddp is not None and ddp.require_backward_grad_sync
        if ddp is not None and self._synchronizes:
            self._read_ddp(ddp)
        if self._tracing is not None:
            self._tracing.tracer.backward_begins()
        queue_callback(self._computed)

    @_harmless
    def arrived(self, entry: GradEntry, param: torch.Tensor) -> None:
        if not self._in_backward:
            self.backward_begins()
        self._fired = True
        if self._tracing is not None and self._tracing.tracer.each_gradient:
            self._tracing.tracer.arrived(entry.index)
        if self._synchronizes:
            if self._checks is not None and self._checks.counts_nonfinite:
                self._checks.count_nonfinite(entry, param.grad)
            self._launches.arrived(entry.index)

    @_harmless
    def _computed(self) -> None:
        """This rank has computed all of its gradients: see [Two callbacks]."""
        self._in_backward = False
        if not self._fired:  # torch.autograd.grad: no gradient was accumulated
            return
        if self._tracing is not None:
            self._tracing.tracer.backward_ends()
        if self._synchronizes:
            self._launches.finish()
            if not self._late:
                self._announce()
            self._recorder.start_waiting(self._on_device)
            self._computed_at = None if self._tracing is None else self._tracing.tracer.detail()
            queue_callback(self._averaged)

    @_harmless
    def _averaged(self) -> None:
        self._finish_record()
        if self._tracing is not None:
            self._tracing.write_layout(BucketLayout(self._position.step, self._launches.layout))
            self._tracing.over(self._position.step, self._buckets)
        if self._late:
            self._announce()
        self._position.next_step()
        self._begin_step()
        self._compare(ObserverChecks.hear)

    def _finish_record(self) -> None:
        known = self._first_launch is not None and not self._on_device  # NCCL's own streams are not timed
        spans = [(self._first_launch or 0.0, time.perf_counter())] if known else []
        nbytes = 0 if self._late else sum(each.nbytes for each in self._buckets)  # what a user's hook sends, it knows
        self._recorder.finish_step(self._position.step, spans, nbytes, len(self._buckets), None, self._sent(nbytes))
        if self._tracing is not None:
            averaged_at = self._tracing.tracer.detail()
            for bucket in self._buckets:
                bucket.wait_begins(self._computed_at)
                bucket.wait_ends(averaged_at)

    def _sent(self, nbytes: int) -> int:
        """Bytes on a network: what a ring sends, as gloo and NCCL sum large buckets; NCCL needs none in a host."""
        if not self._uses_sockets and (self._lane is None or self._lane.one_host):
            return 0
        return round(2 * (self._size - 1) / self._size * nbytes)

    # Of optimizers by hooks on all of them

    @_harmless
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_ours(optimizer):
            if self._checks is not None:
                self._checks.add_optimizer(optimizer)
            if self._tracing is not None:
                self._tracing.tracer.optimizer_begins()

    @_harmless
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._tracing is not None and self._is_ours(optimizer):
            self._tracing.tracer.optimizer_ends()

    def _is_ours(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer steps this model; a group of parameters is of one model, so its first tells."""
        return any(id(param) in self._indices for group in optimizer.param_groups for param in group["params"][:1])

    # What DDP is about to do

    def _read_ddp(self, ddp: DistributedDataParallel) -> None:
        if ddp._delay_all_reduce_all_params:  # it has neither buckets nor hooks
            return
        if self._checks is not None:
            # Ranks that are out of data take part in sums, but in nothing of ours.
            self._checks.pause(ddp._join_config.enable)
        # A hook of the user's may write parameters until backward has ended.
        self._late = ddp.mixed_precision is not None or bool(ddp._comm_hooks)
        launches = self._launches
        if not launches.layout or (ddp._has_rebuilt_buckets and not launches.settled):
            launches.read(ddp._get_ddp_logging_data())

    def _launched(self, bucket: int) -> None:
        if self._first_launch is None:
            self._first_launch = time.perf_counter()
        moments = BucketMoments(bucket, self._launches.layout[bucket].nbytes)
        self._buckets.append(moments)
        if self._tracing is not None:
            moments.ready = moments.launched = self._tracing.tracer.detail()
            self._tracing.tracer.left(bucket)

    # Between the ranks

    def _announce(self) -> None:
        self._compare(ObserverChecks.announce)

    def _compare(self, do: Callable[[ObserverChecks], None]) -> None:
        if self._checks is None:
            return
        try:
            do(self._checks)
        except Exception as error:
            self._checks.stop()
            if self._strict and isinstance(error, Disagreement):
                raise
            say(f"replicas are no longer compared, and training goes on: {error}")

    def _follow_replaced(self) -> None:
        """Parameters were replaced, or moved."""
        ddp = self._ddp()
        replaced = [] if ddp is None else follow_parameters(self._entries, ddp.module)
        self._indices = {id(entry.param): entry.index for entry in self._entries}
        if not replaced:
            return
        self._hooks.listen_anew(replaced)
        if self._checks is not None:
            self._checks.replaced()
        text = describe_replaced(replaced)
        if self._tracing is not None:
            self._tracing.tracer.health(
                Health(self._position.step, "replaced", [dist.get_rank()], replaced[0].name, None, text)
            )
        say(f"{self._position.place()} {text}")

    def _end(self, error: Exception) -> None:
        """Watching went wrong."""
        self._over = True
        say(f"{self._position.place()} this DistributedDataParallel is no longer observed, and trains on: {error!r}")
        if self._tracing is not None:
            self._tracing.failed(error)
            self._tracing.close()
            self._tracing = None
        if self._lane is not None:
            self._lane.close(together=False)
