"""The way of a step: what happens when forward begins, backward begins and ends, and the optimizer steps.

`Steps` is what the hooks call. It decides whether a backward synchronizes, counts windows, and sees to it
that every rank takes part in every synchronization, whatever its own backward did.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch.optim import Optimizer

from gradsync.engine.bucket import Entry
from gradsync.engine.building import Engine
from gradsync.engine.census import Census
from gradsync.engine.hooks import Hooks, queue_callback, recomputing, refuse_compiled_autograd
from gradsync.engine.late_hooks import LateHooks
from gradsync.engine.pacing import check_hooked
from gradsync.engine.shared_backward import conclude
from gradsync.engine.tracing import Tracing
from gradsync.engine.turns import Turns
from gradsync.engine.user_hooks import UserHooks
from gradsync.engine.witness import Both, Nobody, Witness
from gradsync.engine.wrapping import check_wrapper, refuse_wrappers
from gradsync.errors import BackwardAborted, GradSyncError, NonFinite, PeerFault
from gradsync.guard.calls import Call, meet
from gradsync.guard.header import Flag, Head


class Steps:
    """The step under way, and who takes part in it."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[Optimizer],
        engine: Engine,
        ignored: set[int],
        listens: bool,
    ) -> None:
        self.witness: Witness = Nobody()
        self.tracing: Tracing | None = None
        self.no_sync_depth = 0
        self.unsynchronized = False  # a backward ran under no_sync() since the last synchronization
        self.joining = False
        self.active: list[int] | None = None  # who voted to be active in this step, inside join()
        self.failed = False
        self._entries = engine.reducer.entries
        self._in_backward = False  # since its beginning until its end-of-backward callback
        self._fired = False  # whether a gradient arrived in this backward
        self._late_hooks = LateHooks()
        self._spoiled = False  # a backward of this window raised: the window will be dropped everywhere
        self.turns = Turns(optimizers)
        self._trainable = [entry.param.requires_grad for entry in self._entries]
        self._census = Census(model, self._entries, ignored)
        self.user_hooks = UserHooks(self._entries)
        self.user_hooks.check = lambda name: check_hooked(self.plan, [name])
        self.install(engine)
        self._lock = threading.Lock()  # autograd has a thread per device, and each may bring the first gradient
        # One rank alone has nothing to hear of: it costs nothing.
        self._hooks = Hooks(self, model, optimizers, self.user_hooks) if listens else None
        if self._hooks is not None:
            self._hooks.listen(self._entries)
            self.user_hooks.take_over_optimizers()
            self._hooks.handles.append(refuse_wrappers(model))

    def install(self, engine: Engine) -> None:
        """Work with this one from now on; nothing of a synchronization exists yet."""
        self.plan, self.reducer, self.pace = engine
        self._lane = self.reducer.lane
        self._census.place = self._lane.place
        self.reducer.witness = self.witness
        if self.tracing is not None:
            self.tracing.follow(self.reducer)

    def tell(self, witness: Witness) -> None:
        """Let somebody hear of every moment, before those who hear of it already."""
        if not isinstance(self.witness, Nobody):
            witness = Both(witness, self.witness)
        self.witness = self.reducer.witness = witness

    def trace(self, tracing: Tracing) -> None:
        """Write down every moment from now on."""
        self.tracing = tracing
        tracing.follow(self.reducer)
        self.tell(tracing)

    @property
    def in_micro_batch(self) -> bool:
        """Whether a micro-batch has begun and not ended; what runs under no_sync() by hand ends with each backward."""
        inside = self.pace.backwards % self.pace.per_batch > 0 or (self.pace.k > 1 and bool(self.unsynchronized))
        return self._in_backward or inside

    # For the hooks

    def before_forward(self) -> None:
        """A forward with gradients starts: put right what an aborted backward left, notice changes, vote."""
        check_wrapper()
        self.drop_if_aborted()
        self._notice_changes()
        self.witness.border()
        self.vote_if_joining()
        with self.failing():
            self.pace.before_forward()
        self.witness.forward_begins()

    def backward_begins(self) -> None:
        """The gradient of the model's output is known: backward has begun."""
        if not self._in_backward:
            refuse_compiled_autograd(self._lane.place)
            self._late_hooks.begins(known=True)
            self._begin()

    def arrived(self, entry: Entry, param: torch.Tensor) -> None:
        """A parameter's gradient has been accumulated."""
        try:
            if not self._fired:
                self._first_arrival()
            self.reducer.arrived(entry)
        except BaseException as error:
            self._give_up(error)
            raise

    def before_step(self, optimizer: Optimizer, closure: bool) -> None:
        """`optimizer.step()` is called; with a closure its backward is still to come."""
        if self.user_hooks.delivering:  # by a hook, which applies what was brought
            return
        self.drop_if_aborted()
        self._census.check_optimizer(optimizer)
        self._notice_changes(unheard=True)
        if not closure:
            self._before_update(optimizer)

    def closure_ran(self, optimizer: Optimizer) -> None:
        """Backward has run inside of `step()`, which now applies `.grad`; see [Closures] in hooks.py."""
        self._before_update(optimizer)

    def after_step(self, optimizer: Optimizer, closure: bool) -> None:
        """`optimizer.step()` has run."""
        if self.user_hooks.delivering:
            return
        self.witness.optimizer_ends()
        self.turns.step_ended()
        with self.failing():
            self.pace.after_step(optimizer)

    def _before_update(self, optimizer: Optimizer) -> None:
        """Take part in a synchronization that this rank's backward missed; then `.grad` is applied."""
        if self.unsynchronized:
            raise GradSyncError(
                f"{self._lane.place()} optimizer.step() would apply gradients that only this rank has: its last "
                "backward ran under no_sync(). Run the last backward of a step outside of it, or call drain()"
            )
        with self.failing():
            self.pace.before_step(optimizer)
        self.take_part(optimizer)
        self.witness.optimizer_begins()

    def take_part(self, optimizer: Optimizer) -> None:
        """Before a step: if no backward came since the last one, synchronize without a gradient."""
        if self.turns.missed(optimizer):
            # No gradient arrived since the last step: the loss touched no parameter. The others wait for us.
            self.witness.border()
            self.vote_if_joining()
            self.reducer.set_aside()
            self.turns.backward_ended()
            self.reducer.backwards += self.pace.per_batch
            self._end_of_backwards(self.pace.per_batch, self.synchronize_now)
            self.user_hooks.deliver()
        self.turns.stepped(optimizer)

    # The way of a backward; see [Side by side] in shared_backward.py

    def _begin(self) -> None:
        self._refuse_if_failed()
        self.witness.border()  # usually before forward already
        self._in_backward = True
        self._fired = False
        self.user_hooks.take_over_optimizers()
        self.vote_if_joining()
        with self.failing():
            self.pace.before_backward()
        self.reducer.begin(synchronize=not self.no_sync_depth and self.pace.streams)
        self.witness.backward_begins()
        queue_callback(self._ended)

    def _first_arrival(self) -> None:
        with self._lock:
            if not self._in_backward:
                self._begin_late()
            if torch.is_grad_enabled():
                raise BackwardAborted(
                    f"{self._lane.place()} backward(create_graph=True) cannot be averaged: the average would not be "
                    "differentiable. Take the inner gradient with torch.autograd.grad(..., create_graph=True) and "
                    "call backward() on the outer loss only"
                )
            self._fired = True
            self._late_hooks.first()

    def _begin_late(self) -> None:
        """The fallback of [Who begins a backward]: the model's own forward was not called."""
        refuse_compiled_autograd(self._lane.place)
        self._late_hooks.begins(known=False)
        self._notice_changes(unheard=True)
        if self.reducer.weighting.changes:
            raise GradSyncError(
                f"{self._lane.place()} micro-batches that weigh differently need to be known before their gradients "
                "come: call the model itself, not its parts"
            )
        counts = self.pace.k > 1 or not self.pace.engine_averages or self.reducer.weighting.weight is not None
        if counts and recomputing():
            raise BackwardAborted(
                f"{self._lane.place()} reentrant checkpointing of a model whose parts are called one by one ends "
                "backward once per segment, so windows, weights and steps would be counted wrongly. Call the model "
                "itself, or use checkpoint(..., use_reentrant=False)"
            )
        self._begin()

    def _ended(self) -> None:
        self._in_backward = False
        fired, self._fired = self._fired, False
        if not fired:
            # torch.autograd.grad: no gradient was accumulated, so nothing is to be synchronized.
            self.reducer.micro.nothing_came(self.reducer.backwards + self.pace.backwards)
            self.reducer.put_back()
            self.pace.put_away()
            return
        self.witness.backward_ends()
        self.turns.backward_ended()
        self.reducer.backwards += 1
        self.reducer.micro.merge()
        if self.plan.overlap == "backward" and len(self.reducer.agenda.buckets) > 1:
            self._late_hooks.ends()
        if self.no_sync_depth:
            self.unsynchronized = True
            return
        if self.pace.engine_averages:
            self._end_of_backwards(1, self._launch)
        else:  # such a pace may wait here
            conclude(partial(self._end_of_backwards, 1, self._launch), self.user_hooks.deliver)

    def _end_of_backwards(self, count: int, synchronize: Callable[[], None]) -> None:
        synchronizes = False
        self.unsynchronized = False  # what no_sync() added up is in this backward's gradients
        try:
            with self.failing():
                synchronizes = self.pace.after_backward(count, self._spoiled)
            self.user_hooks.expect(self.pace, self.reducer.marks, self._spoiled)
        finally:  # a NaN that is raised ends the step too
            if not self.pace.engine_averages:  # the pace has seen to everything
                self.reducer.forget()
                self._step_ends()
                if not self.failed:
                    self.witness.step_ended()
        if synchronizes:
            synchronize()

    def _launch(self) -> None:
        with self.failing():
            self.reducer.watch.paused = self.joining
            self.reducer.launch_rest(self.pace.micro_batches, self._flags(), self._source(), self.turns.steps())
        conclude(self._settle, self.user_hooks.deliver)

    def _settle(self) -> None:
        with self.failing():
            self.reducer.settle_first()
        self._finish()

    def _finish(self, in_backward: bool = True) -> None:
        counts = False
        try:
            with self.failing():
                self.reducer.finish()
            counts = in_backward and not self.reducer.dropped
            self.user_hooks.brought = self.reducer.brought
        finally:  # a NaN that is raised ends the step too
            self.pace.averaged()
            self.turns.begin_anew(sure=self.reducer.delivered)
            self._step_ends()
            self.witness.synchronized(counts)

    def _step_ends(self) -> None:
        self.unsynchronized = False
        self._spoiled = False
        self.active = None

    # Outside of backward

    def synchronize_now(self, flags: Flag = Flag.NONE) -> None:
        """A whole synchronization at once, with the gradients as they stand."""
        self._refuse_if_failed()
        self.pace.before_backward()
        micro_batches = self.pace.micro_batches if self.pace.k > 1 else 1
        with self.failing():
            self.reducer.watch.paused = self.joining
            self.reducer.launch_rest(micro_batches, flags | self._flags(), self._source(), self.turns.steps())
            self.reducer.settle_first()
        self._finish(in_backward=False)
        self.user_hooks.deliver()

    def keep_company(self) -> None:
        """Take part in the others' synchronization without a gradient and with weight 0.

        Nothing of it stays: this rank applies no average, and its next backward must not add to one.
        """
        self.pace.averaged()
        self._clear_gradients()
        self.synchronize_now(Flag.SHADOW)
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        for entry in self._entries:
            entry.param.grad = None

    def expect_step(self) -> None:
        """The next `optimizer.step()` missed nothing, though no backward came before it."""
        self.turns.backward_ended()

    def drain_pace(self) -> bool:
        """Have the pace bring to an end what is under way, backwards under no_sync() among it."""
        if self.unsynchronized and self.pace.replicas_differ:
            raise GradSyncError(
                f"{self._lane.place()} the last backward ran under no_sync(), and this pace counts only others: run "
                "the last backward of a step outside of it, then call drain()"
            )
        with self.failing():
            more = self.pace.drain()
        if more:
            self.user_hooks.expect(self.pace, self.reducer.marks)
            self.user_hooks.deliver()
        if self.unsynchronized:
            self.reducer.forget()
            self.unsynchronized = False
        return more

    def drop_if_aborted(self) -> None:
        """If the last backward raised before its end, see to it that all ranks drop what it belonged to.

        If it was to synchronize, buckets of it may be under way, and the others wait: finish it now.
        Otherwise the window goes on without gradients, and is dropped when it is full.
        """
        if not self._in_backward:
            return
        self._in_backward = False
        self.turns.backward_ended()
        fired, self._fired = self._fired, False
        if fired and not self.no_sync_depth:
            self._spoiled = True
            self._end_of_backwards(1, self.synchronize_now)
            self.user_hooks.deliver()

    def meet(self, call: Call, word: bytes = bytes(8), flags: Flag = Flag.NONE) -> list[Head]:
        """Wait until every rank is in this call."""
        self._refuse_if_failed()
        if call is Call.DETACH and sys.exception() is not None:
            # The others may wait elsewhere, in a collective of their framework: they hear of it, we do not wait.
            self._lane.fail()
            raise GradSyncError(f"{self._lane.place()} detached because of an error: nobody is waited for")
        self.drop_if_aborted()
        if call is not Call.DETACH:
            self.witness.border()
        with self.failing():
            self.pace.before_meeting(call)
            return meet(self._lane, call, len(self._entries), word, flags)

    def vote(self, active: bool) -> list[int]:
        """Who has data left, by index in the group."""
        heads = self.meet(Call.VOTE, flags=Flag.NONE if active else Flag.SHADOW)
        return [rank for rank, head in enumerate(heads) if not head.flags & Flag.SHADOW]

    def vote_if_joining(self) -> None:
        """Inside join(), every step starts with a vote."""
        if self.joining and self.active is None:
            self.active = self.vote(active=True)

    @property
    def listens(self) -> bool:
        """Whether hooks are on; one rank alone may need none."""
        return self._hooks is not None

    def close(self) -> None:
        """Take the hooks off."""
        if self._hooks is not None:
            self._hooks.remove()

    @contextmanager
    def failing(self) -> Iterator[None]:
        """After a failed synchronization no rank keeps a partial sum, and nothing more is launched."""
        try:
            yield
        except BaseException as error:
            self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        if self.failed or isinstance(error, BackwardAborted | NonFinite):
            return
        self.failed = True
        if not isinstance(error, PeerFault):
            self._lane.fail()
        self.witness.failed(error)
        for entry in self._entries:
            if entry.param.requires_grad:
                entry.param.grad = None

    def _refuse_if_failed(self) -> None:
        if self.failed:
            raise GradSyncError(f"{self._lane.place()} an earlier synchronization failed; detach and restart the job")

    # Small things

    def _flags(self) -> Flag:
        return Flag.ABORTED if self._spoiled else Flag.NONE

    def _source(self) -> int:
        """Whose buffers count in this step."""
        return self.active[0] if self.active else 0

    def _notice_changes(self, unheard: bool = False) -> None:
        """Notice parameters that were replaced, frozen or thawed since the last step.

        `unheard`: gradients may have come already, of thawed parameters to which nobody listened.
        """
        self._census.check_model()
        trainable = [entry.param.requires_grad for entry in self._entries]
        if trainable != self._trainable:
            assert self._hooks is not None
            for entry, before in zip(self._entries, self._trainable, strict=True):
                thawed = entry.param.requires_grad and not before and entry.param.grad is not None
                if unheard and thawed and not self._hooks.hears(entry):
                    raise GradSyncError(
                        f"{self._lane.place()} parameter {entry.name} was thawed and used before gradsync noticed, "
                        "so its gradient is not averaged; call the model itself, not its parts, in the first step after"
                    )
            self._trainable = trainable
            self.reducer.note_trainable()
            self._hooks.listen(self._entries)
