"""`GradSync`: a model whose replicas are kept in step. Made by `attach`, taken off by `detach`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradsync.agreement.calls import Call
from gradsync.agreement.header import Flag
from gradsync.checkpoint.collect import StateCollector
from gradsync.engine import several_models
from gradsync.engine.exit_notice import ExitNotice
from gradsync.engine.loader import Batches
from gradsync.engine.loop import StepLoop
from gradsync.engine.loss_scaling import ScalerFollower
from gradsync.engine.replicas import Buffers, broadcast_optimizer, broadcast_scaler, broadcast_tensors
from gradsync.engine.step import Synchronization
from gradsync.errors import Disagreement, GradSyncError
from gradsync.plan import paces
from gradsync.plan.sync_plan import Plan
from gradsync.transport.lane import Lane

if TYPE_CHECKING:
    from gradsync.autotune.controller import Controller

_MAX_WEIGHT = 1e30
T = TypeVar("T")


class GradSync:
    """Keeps one model's replicas in step; see `attach`."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        buffers: Buffers,
        steps: StepLoop,
        controller: Controller | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        self._optimizers = list(optimizers)
        self._buffers = buffers
        self._steps = steps
        self._controller = controller
        self._state_collector = StateCollector(steps)
        self._scaling = ScalerFollower(scaler, steps)
        self._leaving = ExitNotice(steps)
        self._attached = True

    @property
    def plan(self) -> Plan:
        """The plan that it runs with; with `gs.auto()` this changes between two steps."""
        return self._steps.plan

    @property
    def _synchronization(self) -> Synchronization:
        return self._steps.synchronization

    @property
    def _lane(self) -> Lane:
        return self._steps.lane

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only add to the local `.grad`, as in DDP; the next one outside synchronizes all."""
        self._refuse_if_detached()
        self._steps.enter_no_sync()
        try:
            yield
        finally:
            self._steps.leave_no_sync()

    @contextmanager
    def naming_lost(self, what: str = "a collective of others") -> Iterator[None]:
        """Let errors of code that communicates beside us leave as `PeerLost` if they come of a lost rank.

        A process group tells that a connection closed, not whose. `what` is how the message names that code.
        """
        try:
            yield
        except RuntimeError as error:
            if self._attached and self._lane.groups.size > 1 and not isinstance(error, GradSyncError):
                self._lane.name_lost(what, error)
            raise

    def set_batch_weight(self, weight: float) -> None:
        """Set how much this rank's gradient counts in this step's mean (its tokens, say); 1 if never called.

        Call it before a backward: before the step's first, for all of them, or before each micro-batch of
        `accumulate(k)` or `no_sync()`, for that one. The mean over all of them is Σ w·g / Σ w, and what has weight 0
        brings nothing, not even its NaN.
        """
        self._refuse_if_detached()
        try:
            value = math.nan if isinstance(weight, bool) else float(weight)
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        if not 0 <= value <= _MAX_WEIGHT:
            raise ValueError(f"a batch weight must be a number from 0 to {_MAX_WEIGHT:g}, got {weight!r}")
        self._refuse_unless_averaging("set_batch_weight()", "scale the loss instead")
        if self.plan.combine == "sum":
            raise ValueError('batch weights need combine="mean"; with "sum" scale the loss instead')
        self._steps.dropped_batches.drop_raised_before_weight()
        if self._steps.dropped_batches.retries.inside:  # what is tried again comes to nothing
            return
        if self._steps.in_micro_batch and not self._steps.dropped_batches.spoiled:
            raise GradSyncError(
                f"{self._lane.place()} set_batch_weight() came after the micro-batch's first backward; "
                "call it before, since gradients are already on their way"
            )
        self._synchronization.micro.set_weight(value, self._steps.pace.micro_batches, self._synchronization.backwards)
        self._steps.dropped_batches.weight_comes(value)

    @contextmanager
    def join(self) -> Iterator[None]:
        """Let ranks have unequally many batches: who is out of data keeps the others company.

        Inside, every step starts with a one-word vote. A rank that leaves the block shadows the others'
        synchronizations with weight 0 until all have left; then parameters, buffers, optimizer state and loss scale
        come from a rank that was active last. What was only shadowed leaves no `.grad` behind.
        """
        self._refuse_if_detached()
        self._refuse_unless_averaging("join()", "let all ranks take equally many steps")
        several_models.enter(self._steps)
        last: list[int] = []
        try:
            yield
            several_models.leave(
                self._steps, several_models.JoinEnd(lambda: self._shadow(last), lambda: self._level(last))
            )
        finally:
            several_models.left(self._steps)

    def _shadow(self, last: list[int]) -> None:
        """Keep the others company until all have left; `last` becomes those that were active last, if this saw any."""
        steps = self._steps
        steps.dropped_batches.drop_raised()
        if steps.pace.backwards or steps.unsynchronized:
            window = f"{steps.pace.micro_batches} micro-batches of a short last window"
            warnings.warn(
                f"{self._lane.place()} {window if steps.pace.backwards else 'the last backwards under no_sync()'} are "
                "lost; call sync.drain() and optimizer.step() before the end of join()",
                stacklevel=4,
            )
        if steps.active is not None:
            # It voted to be active, but no synchronization came of it: it owes the others one.
            self._keep_company()
        while active := steps.vote(active=False):
            steps.activate(active)
            last[:] = active
            self._keep_company()

    def _keep_company(self) -> None:
        """Take part in the others' synchronization without a gradient and with weight 0.

        Nothing of it stays: this rank applies no average, and its next backward must not add to one.
        """
        self._steps.pace.averaged()
        self._steps.clear_gradients()
        self._steps.synchronize_now(self._steps.pace.micro_batches, Flag.SHADOW)
        self._steps.clear_gradients()

    def _level(self, last: list[int]) -> None:
        # Ranks that left last saw no vote in which others were active: those that left before know.
        heads = self._steps.meet(Call.BROADCAST, (last[0] if last else 0).to_bytes(8, "little"))
        self.broadcast(max(int.from_bytes(head.digest, "little") for head in heads))

    def broadcast(self, source: int = 0) -> None:
        """Make parameters, buffers, optimizer state and loss scale on every rank those of the group's `source`."""
        self._refuse_if_detached()
        size = self._lane.groups.size
        if isinstance(source, bool) or not isinstance(source, int) or not 0 <= source < size:
            raise ValueError(f"source must be a rank of the group, from 0 to {size - 1}, got {source!r}")
        named = {head.digest for head in self._steps.meet(Call.BROADCAST, source.to_bytes(8, "little"))}
        if len(named) > 1:
            sources = sorted(int.from_bytes(each, "little") for each in named)
            raise Disagreement(f"{self._lane.place()} broadcast() was called with different sources: {sources}")
        with self._steps.failing():
            tensors = [entry.param.detach() for entry in self._synchronization.entries] + self._buffers.tensors()
            broadcast_tensors(self._lane, tensors, source, "the model's parameters")
            for optimizer in self._optimizers:
                broadcast_optimizer(self._lane, optimizer, self._synchronization.entries, source)
            broadcast_scaler(self._lane, self._scaling.scaler, source)
            self._scaling.broadcast()
            self._steps.pace.reset()
            self._steps.step_counts.begin_anew()
            self._steps.drift_monitor.made_equal()

    def data(self, batches: Iterable[T]) -> Iterator[T]:
        """The loader's batches; where it raises, all ranks drop that batch, and the next one may be asked for.

        With a trace, the time that each takes to come is known exactly as the step's input.

        for x, y in sync.data(loader):
        """
        tracing = self._steps.tracing
        return Batches(iter(batches), self._steps.dropped_batches, None if tracing is None else tracing.tracer)

    def drain(self) -> bool:
        """Bring to an end what is under way, on every rank; True if `.grad` holds something for one more step.

        `accumulate(k)`: its short last window. `delayed(k)`: one of the averages that are still to be applied. Paces
        that average parameters do so now. At the end of training, whatever the pace:

            while sync.drain():
                optimizer.step()
                optimizer.zero_grad()
        """
        self._refuse_if_detached()
        self._steps.dropped_batches.drop_raised()
        self._steps.step_counts.backward_ended()  # the next step() missed nothing
        self._steps.step_counts.begin_anew()
        if not self._steps.pace.engine_averages:
            return self._steps.drain_pace()
        if self._steps.pace.k > 1 or self._steps.unsynchronized:
            several_models.before_batch(self._steps)
            self._steps.synchronize_now(self._steps.pace.micro_batches)
            return self._synchronization.delivered
        return False

    @property
    def mid_window(self) -> bool:
        """True if `step()` would find nothing now: a window of `accumulate(k)` is not full, or `delayed(k)` begins.

        Ask it where a loop does something once per step of the optimizer: a scheduler, a log of the gradients' norm, a
        GradScaler that attach was not given.
        """
        return self._steps.pace.mid_window

    @property
    def replicas_equal(self) -> bool:
        """True if all ranks hold the same parameters now: not between two averages of `local_sgd(k)` or `diloco(k)`,
        and not with `async_sgd` and `gossip` before `drain()`. If so, rank 0's model alone is a checkpoint of all.
        """
        return self._steps.pace.replicas_equal

    @property
    def dropped(self) -> bool:
        """True if the last synchronization came to nothing on every rank: a NaN, or a backward that raised."""
        return self._steps.dropped_batches.drops or self._synchronization.dropped or self._steps.pace.dropped

    def stats(self) -> dict[str, float | int | str | None]:
        """Return what the last steps cost: medians, as a flat dict; docs/stats.md explains each key."""
        stats = self._steps.recorder.stats()
        sent_nbytes, stats["algorithm"] = self._synchronization.sender.traffic() if stats["nbytes"] else (0, None)
        if self._steps.pace.engine_averages:
            stats["sent_nbytes"] = sent_nbytes
        stats["predicted_step_s"] = None if self._controller is None else self._controller.predicted_s
        stats["link_bandwidth"] = None if self._controller is None else self._controller.link_bandwidth
        stats |= self._synchronization.health_log.stats()
        return stats | self._synchronization.sender.tally.stats() | self._steps.pace.stats()

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return what compression has not sent yet, by parameter: this rank's share of the mean. Copies."""
        with self._steps.failing():
            self._steps.pace.settle()
        return self._synchronization.sender.kept().residuals

    def state_dict(self, *, all_ranks: bool = False) -> dict[str, torch.Tensor]:
        """Return what a resumed run needs to continue to the bit: a flat dict of tensors, copies; docs/checkpoint.md.

        Every rank saves its own, without communication but for a batch that raised, which the others wait for. With
        `all_ranks` every rank must call it; rank 0 gets the state of all, in host memory, and the others an empty dict.
        """
        if all_ranks:
            self._refuse_if_detached()
        state = self._state_collector.state_of_all() if all_ranks else self._state_collector.state()
        return state | self._controller.state() if state and self._controller is not None else state

    def load_state_dict(self, state: Mapping[str, torch.Tensor] | None) -> None:
        """Continue from `state_dict()`; every rank calls it, with its own state, that of all ranks, or none.

        What a rank needs and another has comes from there: rank 0 alone may bring the state of all. With another
        number of ranks the sum of residuals is kept. A warning names ranks whose residual nobody brings: it is zero.
        """
        self._refuse_if_detached()
        if self._controller is not None:
            self._controller.take_plan(state or {})
        self._state_collector.load(state or {})
        if self._controller is not None:
            self._controller.follow_step()
        if self._steps.tracing is not None and self._steps.pace.engine_averages:
            self._steps.tracing.continue_at(self._lane.step)

    def detach(self) -> None:
        """Take everything off again: hooks, groups, threads. Gradients stay as they are.

        Every rank calls it in the same step: where others still train, this raises what they raise, and is done.
        """
        if not self._attached:
            return
        self._attached = False
        if self._steps.tracing is not None:
            self._steps.tracing.close()
        self._scaling.close()
        self._steps.close()
        self._leaving.close()
        together, objection = self._lane.session.goodbye(partial(self._steps.meet, Call.DETACH))
        self._steps.pace.close(together)
        for entry in self._synchronization.entries:
            if entry.param.grad is not None and entry.param.grad._is_view():
                entry.param.grad = entry.param.grad.clone()
        lost = self._lane.close(together)
        if (error := objection or lost) is not None:
            raise error

    def _refuse_if_detached(self) -> None:
        if not self._attached:
            raise GradSyncError("this GradSync was detached; attach the model again")

    def _refuse_unless_averaging(self, what: str, way_out: str) -> None:
        if not self._steps.pace.engine_averages:
            name = paces.canonical(self.plan.pace)["kind"]
            raise GradSyncError(
                f"{what} needs a mean of gradients in every step, which {name} does not make; {way_out}"
            )
