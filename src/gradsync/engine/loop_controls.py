"""The controls of a loop: what it works with, what all ranks do together outside of steps, the end of a failed run.

Ranks meet for a vote, a broadcast, a state, a plan, and to part. After a failure nothing more is launched, and nobody
applies a partial sum.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from gradsync.agreement.calls import Call, meet
from gradsync.agreement.header import Flag, Head
from gradsync.engine import loop_errors
from gradsync.engine.assemble import Engine
from gradsync.engine.listeners import Hear, moments_of
from gradsync.engine.profiler_spans import ProfilerSpans
from gradsync.engine.trace_step import Tracing
from gradsync.errors import GradSyncError
from gradsync.pace.contract import PaceMoments
from gradsync.transport.session import giving_up

if TYPE_CHECKING:
    from gradsync.engine.dropped_batches import Backward, DroppedBatches
    from gradsync.engine.user_hooks import UserHooks


class LoopControls(ABC):
    """The part of `StepLoop` that is not in the way of a step."""

    dropped_batches: DroppedBatches
    user_hooks: UserHooks
    unsynchronized: int

    def __init__(self, engine: Engine) -> None:
        self.tracing: Tracing | None = None
        self.no_sync_depth = 0
        self.backward: Backward | None = None  # since its beginning until its end-of-backward callback
        self.joining = False
        self.active: list[int] | None = None  # who voted to be active in this step, inside join()
        self.is_due: Callable[[], bool] = bool  # whether `gs.auto()` has something to do at the next border
        self._moments: list[dict[str, Hear]] = []  # of listeners that stay when the plan changes
        self._spans = ProfilerSpans()
        self._profiled = False
        self.install(engine)

    @abstractmethod
    def border(self) -> None:
        """Nothing of the next synchronization exists yet."""

    @abstractmethod
    def launch(self, micro_batches: int, flags: int = Flag.NONE) -> None:
        """Launch what has not left yet, and the header; nothing waits."""

    @abstractmethod
    def finish(self, in_backward: bool = True) -> None:
        """Bring to its end what was launched."""

    @abstractmethod
    def run_user_hooks(self) -> None:
        """Run the user's hooks of parameters whose gradient has been brought."""

    def install(self, engine: Engine) -> None:
        """Work with this one from now on; nothing of a synchronization exists yet."""
        self.plan, self.synchronization, self.pace, self.recorder, self.drift_monitor = engine
        self.lane = self.synchronization.lane
        self._paced = PaceMoments.of(self.pace)
        self.listeners = self.synchronization.listeners
        for moments in self._moments:
            self.listeners.add(first=True, **moments)
        if self._profiled:
            self._spans.follow(self.listeners)
        if self.tracing is not None:
            self.tracing.follow(self.synchronization, self.recorder)

    def tell(self, **moments: Hear) -> None:
        """Let somebody hear of these moments, whatever the plan, before those who hear of them already."""
        self._moments.append(moments)
        self.listeners.add(first=True, **moments)

    def trace(self, tracing: Tracing) -> None:
        """Write down every moment from now on."""
        self.tracing = tracing
        tracing.follow(self.synchronization, self.recorder)
        tracer = tracing.tracer
        self.tell(**moments_of(tracing))
        self.tell(
            forward_begins=tracer.forward_begins,
            backward_begins=tracer.backward_begins,
            backward_ends=tracer.backward_ends,
            optimizer_begins=tracer.optimizer_begins,
            optimizer_ends=tracer.optimizer_ends,
        )

    def enter_no_sync(self) -> None:
        """Backwards add to `.grad` of this rank alone from now on."""
        self.no_sync_depth += 1

    def leave_no_sync(self) -> None:
        """The no_sync() block is left."""
        self.no_sync_depth -= 1

    def profile(self, runs: bool) -> None:
        """A profiler runs from now on, or does no more."""
        self._profiled = runs
        self._spans.follow(self.listeners if runs else None)

    # Failing

    def failing(self) -> AbstractContextManager[None]:
        """Give up after a failure: no rank keeps a partial sum then, and nothing more is launched."""
        return giving_up(self.give_up)

    @property
    def failed(self) -> bool:
        """True if an earlier synchronization failed."""
        return self.lane.session.failed is not None

    def give_up(self, error: BaseException) -> None:
        """Go no further after this error; some errors end a step only."""
        if not self.lane.session.give_up(error):
            return
        for hear in self.listeners.failed:
            hear(error)
        for entry in self.synchronization.entries:
            if entry.param.requires_grad:
                entry.param.grad = None

    def clear_gradients(self) -> None:
        """Leave nothing to which a backward would add."""
        for entry in self.synchronization.entries:
            entry.param.grad = None

    def refuse_if_failed(self) -> None:
        """Raise if an earlier synchronization failed."""
        if self.failed:
            place = self.lane.place()
            raise GradSyncError(f"{place} an earlier synchronization failed; detach and restart the job")

    # Meeting

    def meet(self, call: Call, word: bytes = bytes(8), flags: int = Flag.NONE) -> list[Head]:
        """Wait until every rank is in this call."""
        self.refuse_if_failed()
        if call is Call.DETACH and sys.exception() is not None:
            # The others may wait elsewhere, in a collective of their framework: they hear of it, we do not wait.
            aside = GradSyncError(f"{self.lane.place()} detached because of an error: nobody is waited for")
            self.lane.session.give_up(aside)  # what is under way may never end
            raise aside
        if call is not Call.VOTE:  # before a vote that was done
            self.dropped_batches.drop_raised()
            self.dropped_batches.end_window()
        if call is not Call.DETACH:
            self.border()
        with self.failing():
            self.pace.before_meeting(call)
            return meet(self.lane, call, len(self.synchronization.entries), word, flags)

    def vote(self, active: bool) -> list[int]:
        """Return who has data left, by index in the group."""
        heads = self.meet(Call.VOTE, flags=Flag.NONE if active else Flag.SHADOW)
        return [rank for rank, head in enumerate(heads) if not head.flags & Flag.SHADOW]

    def vote_if_joining(self) -> None:
        """Vote if inside join(), where every step starts with a vote."""
        if self.joining and self.active is None:
            self.active = self.vote(active=True)

    def join_begins(self) -> None:
        """A join() block begins."""
        self.joining = True
        for tell in self.listeners.joining:
            tell(True)

    def activate(self, ranks: list[int]) -> None:
        """Note that these ranks have data left in this step; this one only keeps them company."""
        self.active = ranks

    def join_ends(self) -> None:
        """The join() block is over."""
        self.joining, self.active = False, None
        for tell in self.listeners.joining:
            tell(False)

    def chooses(self, is_due: Callable[[], bool]) -> None:
        """`gs.auto()` says whether it has something to do at the next border."""
        self.is_due = is_due

    def drain_pace(self) -> bool:
        """Have the pace bring to an end what is under way, backwards under no_sync() among it."""
        self.dropped_batches.end_window()
        if self.unsynchronized and self.pace.replicas_differ:
            raise loop_errors.local_drain(self.lane.place())
        with self.failing():
            more = self.pace.drain()
        if more:
            self.user_hooks.expect(self.pace, self.synchronization.marks)
            self.user_hooks.deliver()
        if self.unsynchronized:
            self.synchronization.forget()
            self.unsynchronized = 0
        return more

    @torch.no_grad()  # a gradient that was assigned may have a graph
    def synchronize_now(self, micro_batches: int = 1, flags: int = Flag.NONE) -> None:
        """A whole synchronization at once, with the gradients as they stand."""
        self.refuse_if_failed()
        self.pace.before_backward()
        self.launch(micro_batches if self.pace.k > 1 else 1, flags)
        self.finish(in_backward=False)
        self.run_user_hooks()

    # What becomes of a backward that raised, or brought nothing

    def replace_backward(self, backward: Backward | None) -> Backward | None:
        """The one under way is over, or a second pass over a batch that raised begins; returns what was under way."""
        before, self.backward = self.backward, backward
        return before

    def left_unsynchronized(self) -> None:
        """A backward under no_sync() has ended."""
        self.unsynchronized += 1

    def nothing_came(self) -> None:
        """The backward was torch.autograd.grad: it accumulated no gradient, so nothing is to be synchronized."""
        self.synchronization.nothing_came(self.pace.backwards)
        self.pace.put_away()
