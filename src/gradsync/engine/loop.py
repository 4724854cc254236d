"""The training loop as the hooks tell it: a forward begins, a backward begins and ends, the optimizer steps.

`StepLoop` decides whether a backward synchronizes, counts windows, and sees to it that every rank takes part in every
synchronization, whatever its own backward did. The synchronization itself is in `step`.

Note [Counting steps]
    synchronization ─ step ─ synchronization      every rank says 1
    synchronization ───────── synchronization      this one says 0: two backwards in one step, or a step that it skipped

    Ranks that say different numbers are not in the same step, or no longer replicas. Where a loop may rightly leave a
    step out on one rank only, nothing is said: after a synchronization that came to nothing, and in `drain()`.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradsync.agreement.header import Flag
from gradsync.engine import loop_errors, several_models
from gradsync.engine.assemble import Engine, check_hooked
from gradsync.engine.bucket import GradEntry
from gradsync.engine.dropped_batches import Backward, DroppedBatches, accumulates
from gradsync.engine.hooks import HookListener, Hooks, HookTiming, queue_callback, recomputing, refuse_compiled_autograd
from gradsync.engine.loop_controls import LoopControls
from gradsync.engine.parameters import ModelChanges, note_unhooked
from gradsync.engine.shared_backward import end_together
from gradsync.engine.user_hooks import APPLY_IN_BACKWARD, UserHooks
from gradsync.engine.wrapped_models import check_wrapper, refuse_wrappers
from gradsync.transport.heartbeat import Phase

_numbers = itertools.count()


class StepLoop(LoopControls, HookListener):
    """The step under way, and who takes part in it."""

    def __init__(
        self, model: torch.nn.Module, optimizers: Sequence[Optimizer], engine: Engine, ignored: set[int], listens: bool
    ) -> None:
        super().__init__(engine)
        self.unsynchronized = 0  # backwards under no_sync() since the last one outside of it
        self.number = next(_numbers)  # the same on every rank that has several
        self._entries = engine.synchronization.entries
        self.dropped_batches = DroppedBatches(self)
        self.under_way: Iterator[None] | None = None  # the synchronization that was launched
        self._hook_timing = HookTiming()
        self.step_counts = StepCounts(optimizers)
        kept = engine.synchronization.buffers.kept
        self._model_changes = ModelChanges(model, self._entries, ignored, kept, lambda: self.lane.place())
        self.user_hooks = UserHooks(self._entries, lambda name: check_hooked(self.plan, [name]))
        self._lock = threading.Lock()  # autograd has a thread per device, and each may bring the first gradient
        # One rank alone has nothing to hear of: it costs nothing.
        self._hooks = Hooks(self, model, optimizers, self.user_hooks, self.dropped_batches) if listens else None
        if self._hooks is not None:
            self._hooks.listen(self._entries)
            self.user_hooks.take_over_optimizers()
            self._hooks.handles.append(refuse_wrappers(model))
        else:
            note_unhooked(self._entries, attached=True)

    @property
    def in_micro_batch(self) -> bool:
        """True if a micro-batch has begun and not ended; what runs under no_sync() by hand ends with each backward."""
        inside = self.pace.backwards % self.pace.per_batch > 0 or (self.pace.k > 1 and self.unsynchronized > 0)
        return self.backward is not None or inside

    # For the hooks

    def before_forward(self) -> None:
        """A forward with gradients starts: put right what was aborted, notice changes, vote."""
        if DistributedDataParallel._active_ddp_module is not None:
            check_wrapper()
        self.dropped_batches.drop_raised_before_forward()
        if self.dropped_batches.retries.under_way:
            return
        self._notice_changes()
        self._before_batch()
        if self._paced.before_forward is not None:
            with self.failing():
                self._paced.before_forward()
        for tell in self.listeners.forward_begins:
            tell()
        self.dropped_batches.forward_ran()

    def backward_begins(self) -> None:
        """The gradient of the model's output is known: backward has begun."""
        if self.backward is None or self.backward.raised:
            refuse_compiled_autograd(self.lane.place)
            self._hook_timing.begins(known=True)
            self._begin()

    def arrived(self, entry: GradEntry, param: torch.Tensor) -> None:
        """A parameter's gradient has been accumulated."""
        try:
            backward, under_way = self.backward, self.synchronization
            known = backward is not None and backward.fired and under_way.seen[entry.index] != under_way.number
            if known:
                under_way.arrived(entry)
            elif self._first_arrival():  # before which the plan may have changed
                self.synchronization.arrived(entry)
        except BaseException as error:
            self.give_up(error)
            raise

    def before_step(self, optimizer: Optimizer, closure: bool) -> None:
        """`optimizer.step()` is called; with a closure its backward is still to come."""
        if self.user_hooks.delivering:  # by a hook, which applies what was brought
            return
        self.dropped_batches.drop_raised_before(optimizer)
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
            return
        for tell in self.listeners.optimizer_ends:
            tell()
        self.dropped_batches.retries.ended()
        self.step_counts.step_ended()
        if self._paced.after_step is not None:
            with self.failing():
                self._paced.after_step(optimizer)

    def _before_update(self, optimizer: Optimizer) -> None:
        """Take part in a synchronization that this rank's backward missed; then `.grad` is applied."""
        self.dropped_batches.end_window()
        if self.unsynchronized:
            raise loop_errors.local_step(self.lane.place())
        if self._paced.before_step is not None:
            with self.failing():
                self._paced.before_step(optimizer)
        self.take_part(optimizer)
        for tell in self.listeners.optimizer_begins:
            tell()

    def take_part(self, optimizer: Optimizer) -> None:
        """Synchronize without a gradient before a step, if no backward came since the last one."""
        if self.step_counts.missed(optimizer):
            # No gradient arrived since the last step: the loss touched no parameter. The others wait for us.
            self._model_changes.check_assigned()
            several_models.before_batch(self)
            self.synchronization.missed(self.pace.per_batch)
            self.step_counts.backward_ended()
            self.end_of_backwards(self.pace.per_batch, self.synchronize_now)
            self.run_user_hooks()
        self.step_counts.stepped(optimizer)

    # A backward, from its beginning to its end; see [Side by side] in shared_backward.py

    def _begin(self, known: bool = True) -> None:
        """Begin a backward; `known`: from the model's output, before any gradient."""
        if self.lane.session.failed is not None:
            self.refuse_if_failed()
        self.dropped_batches.another_backward()
        if self.dropped_batches.begins_retry():
            return
        self._before_batch()  # usually before forward already
        if APPLY_IN_BACKWARD in sys.modules:
            self.user_hooks.take_over_optimizers()
        if self._profiled is not torch._C._autograd._profiler_enabled():
            self.profile(not self._profiled)
        end = partial(self._ended)
        self.backward = Backward(bool(self.no_sync_depth), not known or accumulates(self._entries), weakref.ref(end))
        try:
            self.pace.before_backward()
            streams = not self.no_sync_depth and self.pace.streams
        except BaseException as error:
            self.give_up(error)
            raise
        self.synchronization.begin(synchronize=streams)
        for tell in self.listeners.backward_begins:
            tell()
        queue_callback(end)
        self.dropped_batches.backward_begun(self.backward.accumulates)

    def _first_arrival(self) -> bool:
        """A first gradient of a backward, or a second one of a parameter, has come; False if it does not count."""
        with self._lock:
            if self.backward is None or self.backward.raised:
                self._begin_late()
            assert self.backward is not None
            if self.backward.fired or self.backward.aside is not None:
                return self.backward.fired
            if torch.is_grad_enabled():
                raise loop_errors.differentiable(self.lane.place())
            self.backward.fires()
            self._hook_timing.first()
            return True

    def _begin_late(self) -> None:
        """The fallback of [Who begins a backward]: the model's own forward was not called."""
        refuse_compiled_autograd(self.lane.place)
        if self.backward is not None:
            raise loop_errors.mixed_up(self.lane.place())
        self._hook_timing.begins(known=False)
        self._notice_changes(unheard=True)
        if self.synchronization.weighting.changes:
            raise loop_errors.weighed_late(self.lane.place())
        counts = self.pace.k > 1 or not self.pace.engine_averages or self.synchronization.weighting.weight is not None
        if counts and recomputing():
            raise loop_errors.segments(self.lane.place())
        self._begin(known=False)

    def _ended(self) -> None:
        backward, self.backward = self.backward, None
        assert backward is not None
        if not backward.fired:
            self.lane.at(Phase.COMPUTING)
            self.nothing_came()
            return
        for tell in self.listeners.backward_ends:
            tell()
        self.step_counts.backward_ended()
        self.synchronization.backward_counts(1)
        if self.plan.overlap == "backward" and len(self.synchronization.bucket_order.buckets) > 1:
            self._hook_timing.ends()
        if backward.no_sync:
            self.lane.at(Phase.COMPUTING)  # the others come to their next step without it
            self.left_unsynchronized()
            return
        if self.pace.engine_averages:
            self.end_of_backwards(1, self._launch_side_by_side)
        else:  # such a pace may wait here
            self.lane.at(Phase.COMPUTING)
            end_together(partial(self.end_of_backwards, 1, self._launch_side_by_side), self.run_user_hooks)

    def end_of_backwards(self, count: int, synchronize: Callable[[int], None]) -> None:
        """A micro-batch of this rank has ended, or what counts as one. `synchronize` gets the number in the mean."""
        synchronizes = False
        self.dropped_batches.window_ends(self.unsynchronized)
        self.unsynchronized = 0  # what no_sync() added up is in this backward's gradients
        try:
            synchronizes = self.pace.after_backward(count, self.dropped_batches.spoiled)
            micro_batches = self.pace.micro_batches if synchronizes else 0
            if self.user_hooks.by_parameter:
                self.user_hooks.expect(self.pace, self.synchronization.marks, bool(self.dropped_batches.spoiled))
        except BaseException as error:
            self.give_up(error)
            raise
        finally:  # a NaN that is raised ends the step too
            if not self.pace.engine_averages:  # the pace has seen to everything
                self.synchronization.forget()
                self._step_ends()
                for tell in () if self.failed else self.listeners.step_ended:
                    tell()
        if synchronizes:
            synchronize(micro_batches)
        elif self.pace.engine_averages:
            self.lane.at(Phase.COMPUTING)

    def launch(self, micro_batches: int, flags: int = Flag.NONE) -> None:
        """Launch what has not left yet, and the header; nothing waits."""
        steps, source = self.step_counts.steps(), self.active[0] if self.active else 0
        under_way = self.synchronization.synchronize(micro_batches, flags | self.dropped_batches.spoiled, source, steps)
        try:
            next(under_way)
        except BaseException as error:
            self.give_up(error)
            raise
        self.under_way = under_way

    def _launch_side_by_side(self, micro_batches: int) -> None:
        self.launch(micro_batches)
        end_together(self.finish, self.run_user_hooks)

    def finish(self, in_backward: bool = True) -> None:
        """Bring to its end what was launched."""
        under_way, self.under_way = self.under_way, None
        assert under_way is not None
        counts = False
        try:
            next(under_way, None)
            counts = in_backward and not self.synchronization.dropped
            if self.user_hooks.by_parameter:
                self.user_hooks.bring(self.synchronization.brought)
        except BaseException as error:
            self.give_up(error)
            raise
        finally:  # a NaN that is raised ends the step too
            self.pace.averaged()
            self.step_counts.begin_anew(sure=self.synchronization.delivered)
            self._step_ends()
            for hear in self.listeners.synchronized:
                hear(counts)

    def run_user_hooks(self) -> None:
        """Run the user's hooks of parameters whose gradient has been brought."""
        if self.user_hooks.by_parameter:
            self.user_hooks.deliver()

    def _step_ends(self) -> None:
        self.unsynchronized = 0
        self.dropped_batches.step_ends()
        self.active = None

    # Small things

    def _before_batch(self) -> None:
        if self.waits:
            several_models.before_batch(self)
        else:
            self.border()

    @property
    def waits(self) -> bool:
        """True if it waits for the other ranks before its next batch."""
        return self.is_due() or (self.joining and self.active is None)

    def border(self) -> None:
        """Nothing of the next synchronization exists yet."""
        for tell in self.listeners.border:
            tell()

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

    @property
    def listens(self) -> bool:
        """True if hooks are on; one rank alone may need none."""
        return self._hooks is not None

    def close(self) -> None:
        """Take the hooks off."""
        self.dropped_batches.forget()
        several_models.forget(self)
        if self._hooks is not None:
            self._hooks.remove()
        else:
            note_unhooked(self._entries, attached=False)


class StepCounts:
    """A count of steps: which optimizer has stepped since the last backward, and how often. See [Counting steps]."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.num_backwards = 0
        self._seen = {id(optimizer): 0 for optimizer in optimizers}
        self._num_steps = 0  # since the last synchronization
        self._sure = True

    def knows(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer was given to attach."""
        return id(optimizer) in self._seen

    def backward_ended(self) -> None:
        """A backward has ended, or something that counts as one."""
        self.num_backwards += 1

    def missed(self, optimizer: Optimizer) -> bool:
        """Return whether no backward has ended since its last step."""
        return self._seen[id(optimizer)] == self.num_backwards

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has had its turn, even if it applied nothing."""
        self._seen[id(optimizer)] = self.num_backwards

    def step_ended(self) -> None:
        """An optimizer's `step()` has run."""
        self._num_steps += 1

    def steps(self) -> int:
        """Return how many steps there were since the last synchronization, or -1 where that says nothing."""
        return self._num_steps if self._sure and self._seen else -1

    def begin_anew(self, sure: bool = False) -> None:
        """Count from here; `sure` if every rank has the same reason to step."""
        self._num_steps, self._sure = 0, sure

    def is_next(self, optimizer: Optimizer) -> None:
        """An optimizer's step is still to come."""
        self._seen[id(optimizer)] = self.num_backwards - 1
