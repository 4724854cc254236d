"""The way of a step: what happens when forward begins, backward begins and ends, and the optimizer steps.

`Steps` is what the hooks call. It decides whether a backward synchronizes, counts windows, and sees to it
that every rank takes part in every synchronization, whatever its own backward did.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.optim import Optimizer

from gradsync.agreement.calls import Call, meet
from gradsync.agreement.header import Flag, Head
from gradsync.engine import loop_errors, several_models
from gradsync.engine.assemble import Engine, check_hooked
from gradsync.engine.bucket import Entry
from gradsync.engine.dropped_batches import Aborted, Backward, accumulates
from gradsync.engine.hooks import Hooks, LateHooks, queue_callback, recomputing, refuse_compiled_autograd
from gradsync.engine.listeners import Listener, NoListener, TwoListeners
from gradsync.engine.loop_errors import Failing
from gradsync.engine.parameters import ModelChanges
from gradsync.engine.shared_backward import conclude
from gradsync.engine.step_counts import StepCounts
from gradsync.engine.trace_step import Tracing
from gradsync.engine.user_hooks import UserHooks
from gradsync.engine.wrapped_models import check_wrapper, refuse_wrappers
from gradsync.errors import GradSyncError
from gradsync.transport.heartbeat import Phase

_numbers = itertools.count()


class Steps(Failing):
    """The step under way, and who takes part in it."""

    def __init__(
        self, model: torch.nn.Module, optimizers: Sequence[Optimizer], engine: Engine, ignored: set[int], listens: bool
    ) -> None:
        super().__init__(engine.synchronization)
        self.tracing: Tracing | None = None
        self.no_sync_depth = 0
        self.unsynchronized = 0  # backwards under no_sync() since the last one outside of it
        self.number = next(_numbers)  # the same on every rank that has several
        self.is_due: Callable[[], bool] = bool  # whether `gs.auto()` has something to do before the next forward
        self.joining = False
        self.active: list[int] | None = None  # who voted to be active in this step, inside join()
        self._entries = engine.synchronization.entries
        self.aborted = Aborted(self)
        self.backward: Backward | None = None  # since its beginning until its end-of-backward callback
        self.launched: Callable[[], None] | None = None  # how the synchronization that was launched goes on
        self._late_hooks = LateHooks()
        self.step_counts = StepCounts(optimizers)
        self._model_changes = ModelChanges(model, self._entries, ignored, engine.synchronization.buffers.kept)
        self.user_hooks = UserHooks(self._entries)
        self.user_hooks.ran = lambda: self.pace.hooks_ran()
        self.user_hooks.check = lambda name: check_hooked(self.plan, [name])
        self.install(engine)
        self._lock = threading.Lock()  # autograd has a thread per device, and each may bring the first gradient
        # One rank alone has nothing to hear of: it costs nothing.
        self._hooks = Hooks(self, model, optimizers, self.user_hooks, self.aborted) if listens else None
        if self._hooks is not None:
            self._hooks.listen(self._entries)
            self.user_hooks.take_over_optimizers()
            self._hooks.handles.append(refuse_wrappers(model))

    def install(self, engine: Engine) -> None:
        """Work with this one from now on; nothing of a synchronization exists yet."""
        self.plan, self.synchronization, self.pace = engine
        self._lane = self.synchronization.lane
        self._model_changes.place = self._lane.place
        self.synchronization.listener = self.listener
        if self.tracing is not None:
            self.tracing.follow(self.synchronization)

    def tell(self, listener: Listener) -> None:
        """Let somebody hear of every moment, before those who hear of it already."""
        if not isinstance(self.listener, NoListener):
            listener = TwoListeners(listener, self.listener)
        self.listener = self.synchronization.listener = listener

    def ask_if_due(self, is_due: Callable[[], bool]) -> None:
        """Ask this, before a forward, whether `gs.auto()` has something to do."""
        self.is_due = is_due

    def trace(self, tracing: Tracing) -> None:
        """Write down every moment from now on."""
        self.tracing = tracing
        tracing.follow(self.synchronization)
        self.tell(tracing)

    @property
    def in_micro_batch(self) -> bool:
        """Whether a micro-batch has begun and not ended; what runs under no_sync() by hand ends with each backward."""
        inside = self.pace.backwards % self.pace.per_batch > 0 or (self.pace.k > 1 and self.unsynchronized > 0)
        return self.backward is not None or inside

    # For the hooks

    def before_forward(self) -> None:
        """A forward with gradients starts: put right what was aborted, notice changes, vote."""
        check_wrapper()
        self.aborted.put_right_before_forward()
        if self.aborted.retries.under_way:
            return
        self._notice_changes()
        several_models.before_batch(self)
        with self.failing():
            self.pace.before_forward()
        self.listener.forward_begins()
        self.aborted.forward_ran()

    def backward_begins(self) -> None:
        """The gradient of the model's output is known: backward has begun."""
        if self.backward is None or self.backward.raised:
            refuse_compiled_autograd(self._lane.place)
            self._late_hooks.begins(known=True)
            self._begin()

    def arrived(self, entry: Entry, param: torch.Tensor) -> None:
        """A parameter's gradient has been accumulated."""
        try:
            backward = self.backward
            known = backward is not None and backward.fired and entry.seen != self.synchronization.number
            if not known and not self._first_arrival():
                return
            self.synchronization.arrived(entry)
        except BaseException as error:
            self.give_up(error)
            raise

    def before_step(self, optimizer: Optimizer, closure: bool) -> None:
        """`optimizer.step()` is called; with a closure its backward is still to come."""
        if self.user_hooks.delivering:  # by a hook, which applies what was brought
            return
        self.aborted.put_right_before(optimizer)
        self._model_changes.check_optimizer(optimizer)
        self._notice_changes(unheard=True)
        if not closure:
            self._before_update(optimizer)

    def closure_ran(self, optimizer: Optimizer) -> None:
        """Backward has run inside of `step()`, which now applies `.grad`; see [Closures] in hooks.py."""
        self._before_update(optimizer)

    def after_step(self, optimizer: Optimizer, closure: bool) -> None:
        """`optimizer.step()` has run."""
        if self.user_hooks.delivering:
            self.pace.stepped_by_hook(optimizer)
            return
        self.listener.optimizer_ends()
        self.aborted.retries.ended()
        self.step_counts.step_ended()
        with self.failing():
            self.pace.after_step(optimizer)

    def _before_update(self, optimizer: Optimizer) -> None:
        """Take part in a synchronization that this rank's backward missed; then `.grad` is applied."""
        self.aborted.end_window()
        if self.unsynchronized:
            raise loop_errors.local_step(self._lane.place())
        with self.failing():
            self.pace.before_step(optimizer)
        self.take_part(optimizer)
        self.listener.optimizer_begins()

    def take_part(self, optimizer: Optimizer) -> None:
        """Before a step: if no backward came since the last one, synchronize without a gradient."""
        if self.step_counts.missed(optimizer):
            # No gradient arrived since the last step: the loss touched no parameter. The others wait for us.
            self._model_changes.check_assigned()
            several_models.before_batch(self)
            self.synchronization.set_aside()
            self.step_counts.backward_ended()
            self.synchronization.backwards += self.pace.per_batch
            self.end_of_backwards(self.pace.per_batch, self.synchronize_now)
            self.user_hooks.deliver()
        self.step_counts.stepped(optimizer)

    # The way of a backward; see [Side by side] in shared_backward.py

    def _begin(self, known: bool = True) -> None:
        """`known`: from the model's output, before any gradient."""
        self.refuse_if_failed()
        self.aborted.another_backward()
        if self.aborted.begins_aside():
            return
        several_models.before_batch(self)  # usually before forward already
        self.user_hooks.take_over_optimizers()
        end = partial(self._ended)
        self.backward = Backward(bool(self.no_sync_depth), not known or accumulates(self._entries), weakref.ref(end))
        with self.failing():
            self.pace.before_backward()
        self.synchronization.begin(synchronize=not self.no_sync_depth and self.pace.streams)
        self.listener.backward_begins()
        queue_callback(end)
        self.aborted.backward_begun(self.backward.accumulates)

    def _first_arrival(self) -> bool:
        """Also a second gradient of one parameter in one backward, unless that is another one; False: it counts not."""
        with self._lock:
            if self.backward is None or self.backward.raised:
                self._begin_late()
            assert self.backward is not None
            if self.backward.fired or self.backward.aside is not None:
                return self.backward.fired
            if torch.is_grad_enabled():
                raise loop_errors.differentiable(self._lane.place())
            self.backward.fired = True
            self._late_hooks.first()
            return True

    def _begin_late(self) -> None:
        """The fallback of [Who begins a backward]: the model's own forward was not called."""
        refuse_compiled_autograd(self._lane.place)
        if self.backward is not None:
            raise loop_errors.mixed_up(self._lane.place())
        self._late_hooks.begins(known=False)
        self._notice_changes(unheard=True)
        if self.synchronization.weighting.changes:
            raise loop_errors.weighed_late(self._lane.place())
        counts = self.pace.k > 1 or not self.pace.engine_averages or self.synchronization.weighting.weight is not None
        if counts and recomputing():
            raise loop_errors.segments(self._lane.place())
        self._begin(known=False)

    def _ended(self) -> None:
        backward, self.backward = self.backward, None
        assert backward is not None
        self._lane.at(Phase.COMPUTING)  # unless it synchronizes, the others come to their next step without it
        if not backward.fired:
            self.nothing_came()
            return
        self.listener.backward_ends()
        self.step_counts.backward_ended()
        self.synchronization.backwards += 1
        self.synchronization.micro.merge()
        if self.plan.overlap == "backward" and len(self.synchronization.bucket_order.buckets) > 1:
            self._late_hooks.ends()
        if backward.no_sync:
            self.unsynchronized += 1
            return
        if self.pace.engine_averages:
            self.end_of_backwards(1, self._launch)
        else:  # such a pace may wait here
            conclude(partial(self.end_of_backwards, 1, self._launch), self.user_hooks.deliver)

    def nothing_came(self) -> None:
        """It was torch.autograd.grad: no gradient was accumulated, so nothing is to be synchronized."""
        self.synchronization.nothing_came(self.pace.backwards)
        self.pace.put_away()

    def end_of_backwards(self, count: int, synchronize: Callable[[], None]) -> None:
        """A micro-batch of this rank has ended, or what counts as one."""
        synchronizes = False
        self.aborted.window = self.unsynchronized + 1 if self.unsynchronized else 0
        self.unsynchronized = 0  # what no_sync() added up is in this backward's gradients
        if not self.aborted.spoiled:
            self.aborted.counted()
        try:
            with self.failing():
                synchronizes = self.pace.after_backward(count, self.aborted.spoiled)
            self.user_hooks.expect(self.pace, self.synchronization.marks, bool(self.aborted.spoiled))
        finally:  # a NaN that is raised ends the step too
            if not self.pace.engine_averages:  # the pace has seen to everything
                self.synchronization.forget()
                self._step_ends()
                if not self.failed:
                    self.listener.step_ended()
        if synchronizes:
            synchronize()

    def _launch(self) -> None:
        with self.failing():
            self.synchronization.drift_monitor.paused = self.joining
            self.synchronization.launch_rest(
                self.pace.micro_batches, self.aborted.spoiled, self._source(), self.step_counts.steps()
            )
        self.launched = self._settle
        conclude(self._settle, self.user_hooks.deliver)

    def _settle(self) -> None:
        with self.failing():
            self.synchronization.settle_first()
        self.launched = self._finish
        self._finish()

    def _finish(self, in_backward: bool = True) -> None:
        self.launched = None
        counts = False
        try:
            with self.failing():
                self.synchronization.finish()
            counts = in_backward and not self.synchronization.dropped
            self.user_hooks.brought = self.synchronization.brought
        finally:  # a NaN that is raised ends the step too
            self.pace.averaged()
            self.step_counts.begin_anew(sure=self.synchronization.delivered)
            self._step_ends()
            self.listener.synchronized(counts)

    def _step_ends(self) -> None:
        self.unsynchronized = 0
        self.aborted.spoiled = Flag.NONE
        self.active = None

    # Outside of backward

    @torch.no_grad()  # a gradient that was assigned may have a graph
    def synchronize_now(self, flags: Flag = Flag.NONE) -> None:
        """A whole synchronization at once, with the gradients as they stand."""
        self.refuse_if_failed()
        self.pace.before_backward()
        micro_batches = self.pace.micro_batches if self.pace.k > 1 else 1
        with self.failing():
            self.synchronization.drift_monitor.paused = self.joining
            self.synchronization.launch_rest(
                micro_batches, flags | self.aborted.spoiled, self._source(), self.step_counts.steps()
            )
            self.synchronization.settle_first()
        self._finish(in_backward=False)
        self.user_hooks.deliver()

    def drain_pace(self) -> bool:
        """Have the pace bring to an end what is under way, backwards under no_sync() among it."""
        self.aborted.end_window()
        if self.unsynchronized and self.pace.replicas_differ:
            raise loop_errors.local_drain(self._lane.place())
        with self.failing():
            more = self.pace.drain()
        if more:
            self.user_hooks.expect(self.pace, self.synchronization.marks)
            self.user_hooks.deliver()
        if self.unsynchronized:
            self.synchronization.forget()
            self.unsynchronized = 0
        return more

    def meet(self, call: Call, word: bytes = bytes(8), flags: Flag = Flag.NONE) -> list[Head]:
        """Wait until every rank is in this call."""
        self.refuse_if_failed()
        if call is Call.DETACH and sys.exception() is not None:
            # The others may wait elsewhere, in a collective of their framework: they hear of it, we do not wait.
            aside = GradSyncError(f"{self._lane.place()} detached because of an error: nobody is waited for")
            self._lane.session.give_up(aside)  # what is under way may never end
            raise aside
        if call is not Call.VOTE:  # before a vote that was done
            self.aborted.put_right()
            self.aborted.end_window()
        if call is not Call.DETACH:
            self.listener.border()
        with self.failing():
            self.pace.before_meeting(call)
            return meet(self._lane, call, len(self._entries), word, flags)

    def vote(self, active: bool) -> list[int]:
        """Who has data left, by index in the group."""
        heads = self.meet(Call.VOTE, flags=Flag.NONE if active else Flag.SHADOW)
        return [rank for rank, head in enumerate(heads) if not head.flags & Flag.SHADOW]

    @property
    def waits(self) -> bool:
        """Whether it waits for the other ranks before its next batch."""
        return self.is_due() or (self.joining and self.active is None)

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
        self.aborted.forget()
        several_models.forget(self)
        if self._hooks is not None:
            self._hooks.remove()

    # Small things

    def _source(self) -> int:
        """Whose buffers count in this step."""
        return self.active[0] if self.active else 0

    def _notice_changes(self, unheard: bool = False) -> None:
        """Notice parameters that were replaced, frozen or thawed since the last step; `unheard`: see `check_thawed`."""
        self._model_changes.check_model()
        if self._model_changes.trainable_changed():
            assert self._hooks is not None
            if unheard:
                self._model_changes.check_thawed(self._hooks.hears)
            self._model_changes.note_trainable()
            self.synchronization.note_trainable()
            self._hooks.listen(self._entries)
