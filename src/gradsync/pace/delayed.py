"""Delayed averages: gradients travel during the next k steps, and each step applies the average of k steps ago.

    backward       0    1    2    3    4    (k = 2)
    departs        g0   g1   g2   g3   g4
    .grad after    —    —    ḡ0   ḡ1   ḡ2       then drain(): ḡ3, drain(): ḡ4

Every rank applies the same averages in the same order, so replicas stay identical. A flat set of k + 1 parts
carries
them: k are under way or wait, and the one whose average stands in `.grad` is filled next.

    part of g5 = part of ḡ2: what `zero_grad(set_to_none=False)` left in `.grad` lies where it will travel

Note [A backward that raised]
    All ranks drop its step, k steps later. But the average that was due after it is applied by the others at once,
    while this rank's loop has perhaps gone on without `optimizer.step()`: then the step is made up for before the
    next forward.

Note [Buffers are not delayed]
    They are rank 0's after every step, as in `every_step`, so a model with buffers waits for rank 0's backward: an old
    running mean must not replace a new one. With buffers="none" nothing waits.
"""

from __future__ import annotations

from collections import deque

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradsync.agreement.calls import Call
from gradsync.agreement.header import Flag, Mark
from gradsync.errors import GradSyncError, NonFinite
from gradsync.exchange.flat_sets import FlatPart, FlatSet
from gradsync.exchange.means import mean_scale
from gradsync.pace.averages import Average, depart
from gradsync.pace.contract import Due, Pace, SavedPace, Site, State, Stats
from gradsync.pace.loss_scale import Scaling
from gradsync.plan.paces import Delayed
from gradsync.plan.plan import Combine


class DelayedPace(Pace):
    """`delayed(k)` at work."""

    def __init__(self, pace: Delayed, site: Site, combine: Combine, scaler: GradScaler | None) -> None:
        """Every rank makes it at once."""
        self._delay = pace.k
        self._site = site
        self._params = [param for _, param in site.parameters]
        self._share = mean_scale(site.lane.groups.size, combine)
        self._scaling = Scaling(scaler)
        self._flat_set = FlatSet(
            site.parameters, site.exact, site.sender, site.indices, site.bucket_bytes, num_flat_parts=pace.k + 1
        )
        site.lane.tell_several_at_once()  # k headers are under way
        self._averages: deque[Average] = deque()  # to be applied, oldest first
        self._clock = 0  # backwards, and averages that drain() handed out
        self._begun = self._begun_before = False  # whether gradients are there that have not departed
        self._filling = False  # nothing was due after the last backward
        self._owed = Due(site.optimizers)  # see [A backward that raised]
        self._num_steps = -1  # since the last departure; -1: a rank may rightly have left one out
        self._handed: list[torch.Tensor | None] = []  # the average of that step

    # The way of a step

    @property
    def mid_window(self) -> bool:
        return self._filling

    def before_forward(self) -> None:
        if not self._owed:
            return
        if self._scaling.in_use:
            raise GradSyncError(
                f"{self._site.lane.place()} a backward raised, and no step came after it, but the other ranks have "
                "applied the average that was due: with a GradScaler call scaler.step(optimizer) and scaler.update() "
                "after a backward that raised too"
            )
        self._hand_out_again()
        for optimizer in self._site.optimizers:
            if self._owed.waits_for(optimizer):
                optimizer.step()
        self._take_away()

    def before_backward(self) -> None:
        self._begun_before, self._begun = self._begun, True

    def put_away(self) -> None:
        self._begun = self._begun_before

    def after_backward(self, count: int, aborted: Flag) -> bool:
        self._site.buffers.launch(self._site.lane, 0)
        self._depart(aborted)
        self._clock += count
        self._filling, self.dropped = len(self._averages) <= self._delay, False
        if not self._filling:
            self._averages[0].land(self._site)
        self._site.buffers.finish(self._site.lane)
        applies = not self._filling and self._hand_out()
        self._num_steps = 0 if applies and not aborted else -1
        if applies and aborted:
            self._owed.set()
            self._handed = [None if param.grad is None else param.grad.clone() for param in self._params]
        return False

    def before_step(self, optimizer: Optimizer) -> None:
        if any(param.grad is not None for param in self._params):
            self._scaling.check_caller(self._site.lane)

    def after_step(self, optimizer: Optimizer) -> None:
        if self._num_steps >= 0:
            self._num_steps += 1
        if self._owed.done_by(optimizer):
            self._clear_owed()

    def stepped_by_hook(self, optimizer: Optimizer) -> None:
        if self._owed.done_by(optimizer):
            self._clear_owed()

    def hooks_ran(self) -> None:
        if self._owed:
            pairs = zip(self._params, self._handed, strict=True)
            self._handed = [None if param.grad is None else grad for param, grad in pairs]
            if all(grad is None for grad in self._handed):
                self._clear_owed()

    def before_meeting(self, call: Call) -> None:
        self.settle()

    def drain(self) -> bool:
        self._num_steps = -1
        if self._begun:  # under no_sync()
            self.after_backward(1, Flag.NONE)
            if any(param.grad is not None for param in self._params):
                return True
        if self._owed:
            self._hand_out_again()
            self._clear_owed()
            return True
        self._filling = False
        self._take_away()
        while self._averages:
            self._clock += 1
            if self._hand_out():
                return True
        return False

    # Out and back

    @torch.no_grad()
    def _depart(self, aborted: Flag) -> None:
        """Send the gradients off, and leave none behind."""
        lane = self._site.lane
        flat_part = self._flat_set.flat_parts[lane.step % len(self._flat_set.flat_parts)]
        for average in self._averages:
            average.leave(flat_part, self._site)
        # Without a backward the loss touched no parameter: what stands in `.grad` was handed out before.
        marks = self._fill(flat_part, empty=bool(aborted) or not self._begun)
        self._begun = False
        scale = self._scaling.now()
        replica_digest, _ = self._site.watch.announce()
        pending_mean = depart(
            self._site, self._flat_set, flat_part, scale, aborted, clock=self._clock, marks=marks,
            replica_digest=replica_digest, num_steps=self._num_steps,
        )  # fmt: skip
        self._site.watch.take(pending_mean.number)
        self._averages.append(Average(flat_part.views, scale, pending_mean))
        self._take_away()

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
        for flat_bucket in flat_part.flat_buckets if self._share != 1.0 else ():
            flat_bucket.flat.mul_(self._share)
        return marks

    @torch.no_grad()
    def _hand_out(self) -> bool:
        """The oldest average becomes `.grad`; False if it came to nothing."""
        average = self._averages.popleft()
        average.land(self._site)
        average.afterwards()
        self.dropped = average.dropped
        if average.found:
            raise NonFinite(f"{self._site.lane.place()} {average.found}; no rank has applied this average")
        if average.dropped:
            return False
        average.rescale(self._scaling.now())
        for param, view, used in zip(self._params, average.views, average.used, strict=True):
            param.grad = view if used else None
        return any(average.used)

    def _hand_out_again(self) -> None:
        """The loop has perhaps thrown it away, with what was left of the backward that raised."""
        for param, grad in zip(self._params, self._handed, strict=True):
            param.grad = grad

    def _clear_owed(self) -> None:
        self._owed.clear()
        self._handed = []

    def _take_away(self) -> None:
        for param in self._params:
            param.grad = None

    def settle(self) -> None:
        for average in self._averages:
            average.land(self._site)

    # What it stores

    def describe(self, bucket: int) -> str:
        return self._flat_set.describe(bucket) or super().describe(bucket)

    def stats(self) -> Stats:
        return {"num_waiting": len(self._averages)}

    def state(self) -> SavedPace:
        self.settle()
        numbers = {"clock": self._clock, "waiting": len(self._averages), "filling": int(self._filling)}
        shared = {f"delayed.{key}": torch.tensor(number, device="cpu") for key, number in numbers.items()}
        # As many as there can be, whatever there is: shapes say nothing of values.
        nothing = Average([torch.zeros_like(param.detach()) for param in self._params], 1.0)
        for slot in range(max(self._delay, len(self._averages))):
            average = self._averages[slot] if slot < len(self._averages) else nothing
            for key, tensor in average.state(self._flat_set.names).items():
                shared[f"delayed.average{slot}.{key}"] = tensor
        return SavedPace(shared, {})

    def load(self, saved: SavedPace) -> None:
        self.settle()  # rounds that end later would leave its residual here
        self._averages.clear()
        self._flat_set.register()
        self._clear_owed()
        self._begun = False
        self._num_steps = -1
        state = _below(saved.shared, "delayed.")
        self._clock = int(state.get("clock", torch.tensor(0, device="cpu")))
        self._filling = bool(state.get("filling", torch.tensor(0, device="cpu")))
        for slot in range(int(state.get("waiting", torch.tensor(0, device="cpu")))):
            self._averages.append(Average.from_state(_below(state, f"average{slot}."), self._site))


def _below(state: State, prefix: str) -> State:
    return {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
