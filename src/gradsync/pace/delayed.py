"""Delayed averages: gradients travel during the next k steps, and each step applies the average of k steps ago.

    backward       0    1    2    3    4    (k = 2)
    launched       g0   g1   g2   g3   g4
    .grad after    —    —    ḡ0   ḡ1   ḡ2       then drain(): ḡ3, drain(): ḡ4

Every rank applies the same averages in the same order, so replicas stay identical. A flat set of k + 1 parts
carries them: k are under way or wait, and the one whose average stands in `.grad` is filled next.

    part of g5 = part of ḡ2: what `zero_grad(set_to_none=False)` left in `.grad` lies where it will travel

Note [A backward that raised]
    All ranks drop its average, k steps later. But in the step in which it raised the others apply an older one, while
    this rank's loop may have left out `optimizer.step()`, its clipping and its scheduler: nobody but the loop can do
    that step as the others did. So this rank applies nothing then, and is one average behind, until the others have
    nothing to apply: then its loop does, whatever it does with a gradient, what theirs did before.

        rank 0    ḡ0   ḡ1   ḡ2   —    ḡ4          k = 1; what raised is rank 1's backward 3
        rank 1    ḡ0   ḡ1   —    ḡ2   ḡ4          its replica is unlike the others' for one step, and then is not

    Meanwhile its digests are not compared: a replica that is behind has not drifted.

Note [Buffers are not delayed]
    They are rank 0's after every step, as in `every_step`, so a model with buffers waits for rank 0's backward: an old
    running mean must not replace a new one. With buffers="none" nothing waits.

Note [Another loss scale]
    What a GradScaler multiplies losses by may change until an average is applied.

    backward t       .grad = g · s          s: the scale of then
    step t + k       .grad = g · s · s'/s   s': the scale of now, by which `unscale_` divides
"""

from __future__ import annotations

import sys
import warnings
from collections import deque
from types import FrameType

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradsync.agreement.calls import Call
from gradsync.agreement.header import ALIKE_IN_SCALE, Flag, Mark
from gradsync.errors import GradSyncError, NonFinite
from gradsync.exchange.flat_sets import FlatPart
from gradsync.exchange.means import mean_scale
from gradsync.pace.averages import Average, launch_mean
from gradsync.pace.contract import Pace, PaceContext, SavedPace, Stats, below, numbers_in_state
from gradsync.plan.paces import Delayed
from gradsync.transport.lane import Lane


class LossScale:
    """The scaler that `attach` was told of, or none."""

    def __init__(self, scaler: GradScaler | None) -> None:
        self._scaler = scaler

    @property
    def in_use(self) -> bool:
        return self._scaler is not None and self._scaler.is_enabled()

    def now(self) -> float:
        """The scale of a gradient that is made now; without a scaler 1."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def check_caller(self, lane: Lane) -> None:
        """Raise if the `optimizer.step()` that applies gradients comes past our scaler, or from another one."""
        caller = _calling_scaler()
        if caller is None and self.in_use:
            raise GradSyncError(
                f"{lane.place()} optimizer.step() was called without the GradScaler that attach was given, so it would "
                "apply gradients multiplied by its scale: call scaler.step(optimizer) and scaler.update(), also after "
                "sync.drain()"
            )
        if caller is not None and caller is not self._scaler and caller.is_enabled():
            known = "knows of none" if self._scaler is None else "was given another one"
            raise GradSyncError(
                f"{lane.place()} a GradScaler steps the optimizer and gradsync {known}: delayed(k) applies gradients "
                "later than they were made, when the scale may have changed. Pass it, gs.attach(model, optimizer, "
                "plan, scaler=scaler)"
            )


def _calling_scaler() -> GradScaler | None:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "step" and isinstance(scaler := frame.f_locals.get("self"), GradScaler):
            return scaler
        frame = frame.f_back
    return None


class DelayedPace(Pace):
    """`delayed(k)` at work."""

    def __init__(self, pace: Delayed, context: PaceContext) -> None:
        """Every rank makes it at once."""
        self._delay = pace.k
        self._context = context
        self._params = [param for _, param in context.parameters]
        self._mean_scale = mean_scale(context.lane.groups.size, context.plan.combine)
        self._loss_scale = LossScale(context.scaler)
        self._flat_set = context.flat_set(context.parameters, num_flat_parts=pace.k + 1)
        context.lane.tell_several_at_once()  # k headers are under way
        self._waiting: deque[Average] = deque()  # under way or back, oldest first; on every rank the same
        self._due: deque[Average] = deque()  # to be applied now; more than one: see [A backward that raised]
        self._clock = 0  # backwards, and averages that drain() handed out
        self._has_gradients = self._had_gradients = False  # whether gradients are there that were not launched
        self._filling = False  # nothing was due after the last backward
        self._num_steps = -1  # since the last launch; -1: a rank may rightly have left one out

    # The way of a step

    @property
    def mid_window(self) -> bool:
        return self._filling

    def before_backward(self) -> None:
        self._had_gradients, self._has_gradients = self._has_gradients, True

    def put_away(self) -> None:
        self._has_gradients = self._had_gradients

    def after_backward(self, count: int, aborted: int) -> bool:
        self._context.buffers.launch(self._context.lane, 0)
        self._launch(aborted)
        self._clock += count
        self._filling = len(self._waiting) <= self._delay
        if not self._filling:
            self._waiting[0].wait(self._context)
        self._context.buffers.finish(self._context.lane)
        if not self._filling:
            self._fall_due()
        self.dropped = not self._filling and (bool(aborted) or not self._due)
        applies = not aborted and self._deliver()
        self._num_steps = 0 if applies else -1
        return False

    def before_step(self, optimizer: Optimizer) -> None:
        if any(param.grad is not None for param in self._params):
            self._loss_scale.check_caller(self._context.lane)

    def after_step(self, optimizer: Optimizer) -> None:
        if self._num_steps >= 0:
            self._num_steps += 1

    def before_meeting(self, call: Call) -> None:
        for average in self._waiting:
            average.hear(self._context)

    def drain(self) -> bool:
        self._num_steps = -1
        if self._has_gradients:  # under no_sync()
            self.after_backward(1, Flag.NONE)
            if any(param.grad is not None for param in self._params):
                return True
        self._filling = False
        self._clear_gradients()
        while self._waiting or self._due:
            if self._waiting:
                self._clock += 1
                self._fall_due()
            if self._deliver():
                return True
        return False

    # Out and back

    @torch.no_grad()
    def _launch(self, aborted: int) -> None:
        """Send the gradients off, and leave none behind."""
        lane = self._context.lane
        flat_part = self._flat_set.flat_parts[lane.step % len(self._flat_set.flat_parts)]
        for average in (*self._due, *self._waiting):
            average.move_out_of(flat_part, self._context)
        # Without a backward the loss touched no parameter: what stands in `.grad` was handed out before.
        marks = self._fill(flat_part, empty=bool(aborted) or not self._has_gradients)
        self._has_gradients = False
        scale = self._loss_scale.now()
        pending_mean = launch_mean(
            self._context, self._flat_set, flat_part, scale, aborted, clock=self._clock, marks=marks,
            replica_digest=self._context.drift_check.announce()[0], num_steps=self._num_steps, alike=ALIKE_IN_SCALE,
        )  # fmt: skip
        self._context.drift_check.take(pending_mean.number, silent=bool(self._due))
        self._waiting.append(Average(flat_part.views, scale, pending_mean))
        self._clear_gradients()

    def _fill(self, flat_part: FlatPart, empty: bool) -> bytearray:
        """Put this rank's share of the mean into a flat part; what the header says of each parameter."""
        marks, views, grads = bytearray(), [], []
        for view, param in zip(flat_part.views, self._params, strict=True):
            grad = None if empty else param.grad
            marks.append((Mark.TRAINABLE if param.requires_grad else 0) | (0 if grad is None else Mark.USED))
            if grad is None:
                view.zero_()
            else:
                views.append(view)
                grads.append(grad.to_dense() if grad.is_sparse else grad)
        if views:
            torch._foreach_copy_(views, grads)  # what lies there already is copied onto itself
        for flat_bucket in flat_part.flat_buckets if self._mean_scale != 1.0 else ():
            flat_bucket.flat.mul_(self._mean_scale)
        return marks

    def _fall_due(self) -> None:
        """The oldest average is to be applied, unless it came to nothing; the same on every rank."""
        average = self._waiting.popleft()
        average.hear(self._context)
        average.after_drift_check()
        if average.found:
            raise NonFinite(f"{self._context.lane.place()} {average.found}; no rank has applied this average")
        if not average.dropped:
            self._due.append(average)

    @torch.no_grad()
    def _deliver(self) -> bool:
        """The oldest average that is due becomes `.grad`; False if that is nothing."""
        if not self._due:
            return False
        average = self._due.popleft()
        average.rescale(self._loss_scale.now())
        for param, view, used in zip(self._params, average.views, average.used, strict=True):
            param.grad = view if used else None
        return any(average.used)

    def _clear_gradients(self) -> None:
        for param in self._params:
            param.grad = None

    def settle(self) -> None:
        for average in self._waiting:
            average.wait(self._context)

    def reset(self) -> None:
        self._due.clear()

    def close(self, together: bool) -> None:
        if together and self._due:
            self._warn_of_being_behind("call drain() before detach()")

    def _warn_of_being_behind(self, way_out: str) -> None:
        warnings.warn(
            f"{self._context.lane.place()} a batch raised on this rank, and its weights do not hold yet what the other "
            f"ranks have applied meanwhile: {way_out}",
            stacklevel=4,
        )

    # What it stores

    def describe(self, bucket: int) -> str:
        return self._flat_set.describe(bucket) or super().describe(bucket)

    def stats(self) -> Stats:
        return {"num_waiting": len(self._waiting)}

    def state(self) -> SavedPace:
        self.settle()
        if self._due:
            self._warn_of_being_behind(
                f"save {self._delay} or more batches later, or resume from another rank's weights"
            )
        waiting, filling = len(self._waiting), int(self._filling)
        shared = numbers_in_state("delayed", clock=self._clock, waiting=waiting, filling=filling)
        # As many as there can be, whatever there is: shapes say nothing of values.
        nothing = Average([torch.zeros_like(param.detach()) for param in self._params], 1.0)
        for slot in range(max(self._delay, len(self._waiting))):
            average = self._waiting[slot] if slot < len(self._waiting) else nothing
            for key, tensor in average.state(self._flat_set.names).items():
                shared[f"delayed.average{slot}.{key}"] = tensor
        return SavedPace(shared, {})

    def load(self, saved: SavedPace) -> None:
        self.settle()  # rounds that end later would leave its residual here
        self._waiting.clear()
        self._due.clear()
        self._flat_set.register()
        self._has_gradients = False
        self._num_steps = -1
        state = below(saved.shared, "delayed.")
        self._clock = int(state.get("clock", torch.tensor(0, device="cpu")))
        self._filling = bool(state.get("filling", torch.tensor(0, device="cpu")))
        for slot in range(int(state.get("waiting", torch.tensor(0, device="cpu")))):
            self._waiting.append(Average.from_state(below(state, f"average{slot}."), self._context))
