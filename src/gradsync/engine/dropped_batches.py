"""The batches that raised on this rank, and the way in which all ranks come to drop them.

    what raised    how it is known                                   put right by the next
    backward       autograd let go of the callback for its end       forward, step(), drain() …, or backward
    forward        a hook that is called even then                   forward of another batch, step(), drain() …
    the loader     `sync.data(loader)` hands the batches out         forward, or step() without a backward

To put right means to take part, marked as aborted, in what the other ranks do with this batch. Everything goes by what
surrounded the batch when it raised: under `no_sync()` its window goes on, and is dropped when it synchronizes.

Note [A backward, or torch.autograd.grad]
    Both set off the hook on the model's output, and only one of them is missed by the others when it raises. Autograd
    knows which it is: `backward()` without `inputs` executes every node, anything else only what it was asked for.

Note [Models of one backward]
    The first to hear of a backward tells those that it will come to later: if it raises on the way, they would never
    have heard of it. On each of them a few parameters are looked up in the graph.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.variable import Variable
from torch.optim import Optimizer

from gradsync.agreement.header import Flag
from gradsync.agreement.outcome import TOO_MANY, interrupted
from gradsync.engine.bucket import GradEntry
from gradsync.engine.hooks import queue_callback
from gradsync.engine.retried_batches import Retries, Seen, handled, is_again, number_of
from gradsync.engine.several_models import before_batch
from gradsync.errors import GradSyncError

if TYPE_CHECKING:
    from gradsync.engine.loop import StepLoop

_LOOKED_UP = 4  # parameters at either end of a model
_awaiting: weakref.WeakSet[StepLoop] = weakref.WeakSet()  # those whose forward ran, and no backward since


@dataclass(slots=True)
class Backward:
    """One backward under way, and what surrounded it when it began."""

    no_sync: bool
    accumulates: bool  # see [A backward, or torch.autograd.grad]
    end: weakref.ref[Callable[[], None]]  # the callback, which only autograd keeps
    fired: bool = False  # whether a gradient has arrived
    noted: bool = False  # whether it was noted that it raised
    error: str = ""  # and what, if that was handled then
    aside: Sequence[tuple[torch.Tensor, torch.Tensor | None]] | None = (
        None  # what was in `.grad`, if it comes to nothing
    )

    def fires(self) -> None:
        """Note that its first gradient has arrived."""
        self.fired = True

    @property
    def raised(self) -> bool:
        """True if autograd gave it up before its end; may be asked from inside of the next one."""
        return self.end() is None


class Raised(NamedTuple):
    """A forward or a loader that raised."""

    flag: int
    no_sync: bool
    error: str
    number: int  # of the exception
    turn: int  # backwards that had ended
    inputs: Seen = ()
    before: Seen = ()  # what the forward before this one was given


class DroppedBatches:
    """The batches that raised on this rank and are not put right yet, and what they spoil."""

    def __init__(self, steps: StepLoop) -> None:
        self.spoiled = Flag.NONE  # what raised in this window: it will be dropped everywhere
        self.window = 0  # backward calls in the last one that was made by hand, under no_sync(); 0: none is
        self._steps = steps
        self._raised: deque[Raised] = deque()
        self._busy = False
        self._weight: float | None = None  # set since something raised: the next batch's
        self._left_behind = False  # an average came when its backward had raised, and no step since
        self._in_a_row = 0  # batches that only this rank dropped
        self.retries = Retries(lambda: steps.lane.place())

    @property
    def drops(self) -> bool:
        """True if the batch that raised just now will come to nothing on every rank, though they were not told yet."""
        backward = self._steps.backward
        aborted = backward is not None and backward.raised and (backward.fired or backward.accumulates)
        return not self._steps.pace.replicas_differ and (aborted or self._forward_raised)

    @property
    def _forward_raised(self) -> bool:
        return any(raised.flag == Flag.FORWARD for raised in self._raised)

    @property
    def _turn(self) -> int:
        return self._steps.step_counts.num_backwards

    # What is heard

    def forward_did(self, error: BaseException) -> None:
        """The model's forward raised."""
        if not self.retries.under_way:
            when = self._turn, self.retries.inputs, self.retries.before
            self._note(Raised(Flag.FORWARD, self._steps.no_sync_depth > 0, _said(error), number_of(error), *when))

    def loader_did(self, error: BaseException) -> None:
        """The loader raised instead of giving a batch."""
        self.batch_came()
        self._note(Raised(Flag.LOADER, self._steps.no_sync_depth > 0, _said(error), number_of(error), self._turn))

    def batch_came(self) -> None:
        """The loader was asked for another batch: the one before is not tried again."""
        self._note_backward()
        self.retries.another_batch()

    def _note(self, raised: Raised) -> None:
        if self._steps.listens and not self._steps.failed:
            self._raised.append(raised)

    def forward_comes(self, inputs: Iterable[torch.Tensor]) -> None:
        """A forward begins: see [Tried again] in retried_batches.py."""
        now = list(inputs)
        if self._raised and self._raised[-1].flag == Flag.FORWARD:
            last = self._raised[-1]
            if last.number in handled() or is_again(last.inputs, last.before, now):
                self._raised.pop()
        self._note_backward()
        self.retries.forward_comes(now)

    def _note_backward(self) -> None:
        """Note a backward that raised: its batch may be tried again."""
        backward = self._steps.backward
        if backward is None or backward.noted or not backward.raised:
            return
        backward.noted = True
        if backward.aside is None and (backward.fired or backward.accumulates):
            self.retries.backward_raised()
            error = sys.exception()
            backward.error = _said(error) if error is not None and self.retries.inside else ""

    def weight_comes(self, weight: float) -> None:
        """The user set a weight: if something raised before, it is not for that batch."""
        if self._raised:
            self._weight = weight

    # What is done

    def drop_raised(self, loader: bool = True) -> None:
        """Have every rank drop the batches that raised here. `loader`: also one that never came."""
        if self._busy:
            return
        self._busy = True
        self._note_backward()
        try:
            self._complete()
            self._drop_backward(whole=True)
            while self._raised and (loader or self._raised[0].flag != Flag.LOADER):
                raised = self._raised.popleft()
                self._catch_up()
                self._drop(raised.flag, raised.no_sync or self._goes_on(raised), raised.error, whole=True)
        finally:
            self._busy = False
        if self._weight is not None and not self._raised:
            weight, self._weight = self._weight, None
            synchronization = self._steps.synchronization
            synchronization.micro.set_weight(weight, self._steps.pace.micro_batches, synchronization.backwards)

    def drop_raised_before_forward(self) -> None:
        """Put right what raised, before a batch that must not add to a gradient that the loop has left behind."""
        self.drop_raised()
        if self._left_behind:
            self._left_behind = False
            self._steps.clear_gradients()

    def drop_raised_before(self, optimizer: Optimizer) -> None:
        """Put right what raised, before a step that misses a batch of the loader only if no backward came."""
        self.drop_raised(loader=self._steps.unsynchronized > 0 or self._steps.step_counts.missed(optimizer))
        self._left_behind = False

    def drop_raised_before_saving(self) -> None:
        """Put right what raised, before a checkpoint, where the loader may be a batch ahead of what was computed."""
        missed = [each.turn == self._turn for each in self._raised if each.flag == Flag.LOADER]
        self.drop_raised(loader=any(missed[:1]))

    def drop_raised_beside_others(self) -> None:
        """Put right what raised, before another model waits, unless this is about to be tried again."""
        if not (self._forward_raised and any(raised.number in handled() for raised in self._raised)):
            self.drop_raised()

    def drop_raised_before_weight(self) -> None:
        """A weight is for the batch that comes: a backward that raised has to be over. A forward may be tried again."""
        self._complete()
        self._note_backward()
        if self._steps.backward is not None and self._steps.backward.raised:
            self._drop_backward(whole=True)

    def another_backward(self) -> None:
        """A backward begins: one of the same batch may have raised, and a forward that did was not the whole batch."""
        self._complete()
        self._note_backward()
        self._drop_backward(whole=self.retries.backward_comes())
        if self._forward_raised:
            self._raised = deque(each for each in self._raised if each.flag != Flag.FORWARD)

    def begins_retry(self) -> bool:
        """Begin a backward tried again, which comes to nothing; return whether it is one: see `retried_batches`."""
        if not self.retries.under_way:
            return False
        entries = self._steps.synchronization.entries
        aside = [(entry.param, entry.param.grad) for entry in entries if entry.param.requires_grad]
        end = partial(self._end_aside)
        self._steps.replace_backward(Backward(False, True, weakref.ref(end), aside=aside))
        for param, _ in aside:
            param.grad = None
        queue_callback(end)
        return True

    def _end_aside(self) -> None:
        backward = self._steps.replace_backward(None)
        put_back(backward.aside or [] if backward is not None else [])

    def forward_ran(self) -> None:
        """A backward may come to this model now."""
        _awaiting.add(self._steps)

    def forget(self) -> None:
        """The model is detached."""
        _awaiting.discard(self._steps)

    def backward_begun(self, accumulates: bool) -> None:
        """Tell the models to which this backward will come later: see [Models of one backward]."""
        _awaiting.discard(self._steps)
        if accumulates and _awaiting:
            for other in list(_awaiting):
                if other in _awaiting and other.dropped_batches.is_reached():
                    other.backward_begins()

    def is_reached(self) -> bool:
        """Return whether the backward under way will come to this model."""
        trainable = [entry.param for entry in self._steps.synchronization.entries if entry.param.requires_grad]
        return any_executed([*trainable[:_LOOKED_UP], *trainable[_LOOKED_UP:][-_LOOKED_UP:]])

    def end_window(self) -> None:
        """A window under no_sync() in which something raised is given up before its last backward: take part now."""
        if self.spoiled and self._steps.unsynchronized:
            self._steps.end_of_backwards(self._rest(), self._steps.synchronize_now)
            self._steps.run_user_hooks()

    def _complete(self) -> None:
        """Another's callback at the end of backward raised before ours: what was launched has to come back."""
        if self._steps.under_way is not None and not self._steps.failed:
            self._steps.finish()
            self._steps.run_user_hooks()
            self._left_behind = True

    def _catch_up(self) -> None:
        """Do what comes before a batch."""
        steps = self._steps
        steps.refuse_if_failed()
        before_batch(steps, others_first=False)
        with steps.failing():
            steps.pace.before_forward()

    def _drop_backward(self, whole: bool) -> None:
        if self._steps.backward is None:
            return
        backward = self._steps.replace_backward(None)
        assert backward is not None
        if backward.aside is not None:
            put_back(backward.aside)
            return
        if not backward.fired and not backward.accumulates:
            self._steps.nothing_came()
            return
        self._drop(Flag.NONE, backward.no_sync, backward.error, whole)

    def _drop(self, flag: int, no_sync: bool, error: str, whole: bool) -> None:
        """Take part in what the others do with a batch; `whole`: with what was still to come of it too."""
        steps = self._steps
        steps.refuse_if_failed()
        count = self._rest() if whole else 1
        self.spoiled |= Flag.ABORTED | flag
        steps.step_counts.backward_ended()
        steps.synchronization.backward_counts(count)
        if steps.pace.replicas_differ:
            self._tell_alone(flag, error)
        else:
            steps.synchronization.health_log.raised(error)
        if no_sync:
            steps.left_unsynchronized()
        else:
            steps.end_of_backwards(count, steps.synchronize_now)
            steps.run_user_hooks()

    def _goes_on(self, raised: Raised) -> bool:
        """Return whether a window by hand goes on after a batch that never came: nobody knows if it was the last."""
        steps = self._steps
        if raised.flag != Flag.LOADER or not (steps.unsynchronized or self.window):
            return False
        begins_anew = steps.no_sync_depth > 0 and self.window > 0
        return not (begins_anew and steps.unsynchronized + 1 >= self.window)

    def _rest(self) -> int:
        """Return how many backward calls of a batch are still to come."""
        pace = self._steps.pace
        return pace.per_batch - pace.backwards % pace.per_batch

    def _tell_alone(self, flag: int, error: str) -> None:
        """Say that only this rank skips the batch, where every rank steps by itself."""
        lane, self._in_a_row = self._steps.lane, self._in_a_row + 1
        rank = lane.groups.ranks[lane.groups.rank]
        said = f"{lane.place()} {interrupted({rank: Flag.ABORTED | flag})}{f' ({error})' if error else ''}"
        if self._in_a_row >= TOO_MANY:
            with self._steps.failing():
                raise GradSyncError(f"{said}: the {TOO_MANY}th batch in a row that comes to nothing on this rank")
        warnings.warn(f"{said}: the batch is skipped on this rank, where every rank steps by itself", stacklevel=4)

    def window_ends(self, unsynchronized: int) -> None:
        """A micro-batch has ended, after so many backwards under no_sync()."""
        self.window = unsynchronized + 1 if unsynchronized else 0
        if not self.spoiled:  # a batch of this rank came to something
            self._in_a_row = 0

    def step_ends(self, spoiled: int = Flag.NONE) -> None:
        """Forget what raised, which was told; `spoiled`: a state was loaded in whose window something had."""
        self.spoiled = spoiled


def accumulates(entries: Iterable[GradEntry]) -> bool:
    """Return whether the backward under way adds to `.grad`: see [A backward, or torch.autograd.grad]."""
    trainable = (entry.param for entry in entries if entry.param.requires_grad)
    if Variable._execution_engine.is_checkpoint_valid():
        return next(trainable, None) is not None
    return any_executed(trainable)


def put_back(aside: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Let this be in `.grad` again."""
    for param, grad in aside:
        param.grad = grad


def any_executed(params: Iterable[torch.Tensor]) -> bool:
    """Return whether the backward under way adds to `.grad` of one of these."""
    with torch.enable_grad():
        return any(_is_executed(param.view_as(param).grad_fn) for param in params)


def _is_executed(view: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(view.next_functions[0][0]))
    except RuntimeError:  # torch.autograd.grad takes this very gradient, and adds it to nothing
        return False


def _said(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
