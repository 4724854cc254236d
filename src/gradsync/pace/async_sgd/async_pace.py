"""Asynchronous SGD as a pace: a step pushes gradients and reads parameters; what happens between is in `worker`.

    backward ─ clip, unscale ─ optimizer.step:   before   its gradients are taken: the step itself finds none
                                                 after    push, then read
                               no step came      before the next forward: push nothing, then read

So what a loop does to `.grad` counts, and after `step()` the parameters are the newest that this rank may read.
"""

from __future__ import annotations

import contextlib
import time

import torch
from torch.optim import Optimizer

from gradsync.agreement.calls import Call
from gradsync.errors import GradSyncError, NonFinite
from gradsync.pace.async_sgd.worker import AsyncWorker
from gradsync.pace.contract import Due, Pace, PaceContext, SavedPace, Stats, below
from gradsync.pace.trained_parameters import TrainedParameters
from gradsync.plan.paces import AsyncSGD
from gradsync.transport.groups import HOST

_CHANNEL = "shards"
_PREFIX = "async_sgd."
_LEVELLED = (Call.BROADCAST, Call.LOAD, Call.GATHER)


class AsyncSGDPace(Pace):
    """`async_sgd(max_staleness)` at work."""

    replicas_differ = True

    def __init__(self, pace: AsyncSGD, context: PaceContext) -> None:
        """Every rank makes it at once, with equal parameters."""
        groups = context.lane.groups
        groups.add_part(context.parent, _CHANNEL, list(range(groups.size)), HOST)
        self._context = context
        self._trained = TrainedParameters(context)
        channel, named = groups.gloo(_CHANNEL), self._trained.named
        self._worker = AsyncWorker(context.lane, channel, named, context.optimizers, pace, context.lane.timeout)
        self._due = Due(context.optimizers)  # a push
        self._taken: dict[torch.nn.Parameter, torch.Tensor] = {}  # gradients that an optimizer was about to apply
        self._is_level = True  # nobody has pushed since all met

    @property
    def replicas_equal(self) -> bool:
        return self._is_level

    # The way of a step

    def before_forward(self) -> None:
        if self._due:
            self._trained.drop_gradients()  # no step wanted them
            self._push_and_read()

    def before_backward(self) -> None:
        self._due.check_done(self._context.lane)
        self._trained.check()

    def after_backward(self, count: int, aborted: int) -> bool:
        if aborted:
            self._trained.drop_gradients()
        self._due.set()
        return False

    def before_step(self, optimizer: Optimizer) -> None:
        if not self._due:
            return
        if getattr(optimizer, "grad_scale", None) is not None:  # a fused step would divide by it
            raise GradSyncError(
                f"{self._context.lane.place()} a GradScaler leaves it to the fused {type(optimizer).__name__} to "
                "unscale, but async_sgd takes gradients before that; call scaler.unscale_(optimizer) first, or use "
                "fused=False"
            )
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if param.grad is not None:
                self._taken[param] = param.grad
                param.grad = None

    def after_step(self, optimizer: Optimizer) -> None:
        if self._due.done_by(optimizer):
            self._push_and_read()

    def _push_and_read(self) -> None:
        for param, grad in self._taken.items():
            param.grad = grad
        self._taken.clear()
        self._check_finite()
        self._due.clear()
        self._is_level = self._context.lane.groups.size == 1
        self._worker.push()
        self._read()
        self._context.lane.session.continue_at(self._worker.clock)

    def _read(self) -> None:
        """Wait as the bound on staleness says, and record it."""
        begun = time.perf_counter()
        self._context.recorder.start_waiting(on_device=False)
        self._worker.pull()
        self._context.recorder.finish_step(self._worker.clock, [(begun, time.perf_counter())], 0, 0, None)

    def _check_finite(self) -> None:
        if self._context.guard.nonfinite == "allow":
            return
        for name, param in self._trained.named:
            if param.grad is not None and not bool(param.grad.isfinite().all()):
                raise NonFinite(
                    f"{self._context.lane.place()} NaN or Inf in the gradient of {name}; no owner has got it"
                )

    # With all ranks

    def before_meeting(self, call: Call) -> None:
        if call in _LEVELLED and not self._is_level:
            self.drain()

    def drain(self) -> bool:
        if self._due:
            self._push_and_read()
        self._worker.drain()
        self._context.buffers.launch(self._context.lane, 0)
        self._context.buffers.finish(self._context.lane)
        self._context.lane.session.continue_at(self._worker.clock)
        self._is_level = True
        return False

    def stats(self) -> Stats:
        return self._worker.stats()

    def state(self) -> SavedPace:
        return SavedPace({}, {_PREFIX + key: tensor for key, tensor in self._worker.state().items()})

    def load(self, saved: SavedPace) -> None:
        if own := below(saved.own, _PREFIX):
            self._worker.load(own)
        else:
            self._trained.level()
            self.reset()

    def reset(self) -> None:
        self._due.clear()
        self._taken.clear()
        self._worker.restart(self._context.optimizers)

    def close(self, together: bool) -> None:
        with contextlib.suppress(GradSyncError):  # a rank that is gone now can spoil nothing any more
            self._worker.close(together)
