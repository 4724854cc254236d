"""`GradSync`: a model whose replicas are kept in step. Made by `attach`, taken off by `detach`."""

from __future__ import annotations

import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from gradsync.engine.bucket import Entry
from gradsync.engine.hooks import Hooks, queue_callback
from gradsync.engine.reducer import Reducer
from gradsync.engine.replicas import Buffers, broadcast_optimizer, broadcast_tensors
from gradsync.errors import BackwardAborted, Disagreement, GradSyncError, PeerFault
from gradsync.guard.calls import Call, meet
from gradsync.guard.header import Flag, Head
from gradsync.pace.window import Window
from gradsync.plan import Plan
from gradsync.transport.lane import Lane

_STATE_FORMAT = 1


class GradSync:
    """Keeps one model's replicas in step; see `attach`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[Optimizer],
        plan: Plan,
        entries: list[Entry],
        buffers: Buffers,
        reducer: Reducer,
        window: Window,
        listens: bool,
    ) -> None:
        self.plan = plan
        self._optimizers = list(optimizers)
        self._entries = entries
        self._buffers = buffers
        self._reducer = reducer
        self._lane: Lane = reducer.lane
        self._window = window
        # The step under way
        self._in_backward = False  # since its beginning until its end-of-backward callback
        self._fired = False  # whether a gradient arrived in this backward
        self._begun_at: float | None = None
        self._first_at = 0.0
        self._no_sync = 0  # depth of no_sync()
        self._unsynchronized = False  # a backward ran under no_sync() since the last synchronization
        self._num_backwards = 0
        self._seen_backwards = dict.fromkeys(map(id, self._optimizers), 0)
        self._joining = False
        self._active: list[int] | None = None  # who voted to be active in this step, inside join()
        self._late_hooks = 0  # backwards in a row in which all gradients arrived at the end
        self._failed = False
        self._attached = True
        self._trainable = [entry.param.requires_grad for entry in entries]
        # One rank alone has nothing to hear of: it costs nothing.
        self._hooks = Hooks(self, model, optimizers) if listens else None
        if self._hooks is not None:
            self._hooks.listen(entries)

    # For users

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only add to the local `.grad`, as in DDP; the next one outside synchronizes all."""
        self._no_sync += 1
        try:
            yield
        finally:
            self._no_sync -= 1

    def set_batch_weight(self, weight: float) -> None:
        """How much this rank's gradient counts in this step's mean (its tokens, say); 1 if never called.

        Call it before the step's first backward. The mean over the ranks is Σ w·g / Σ w.
        """
        if not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
            raise ValueError(f"a batch weight must be a finite number of at least 0, got {weight!r}")
        if self.plan.combine == "sum":
            raise ValueError('batch weights need combine="mean"; with "sum" scale the loss instead')
        if self._in_backward or self._reducer.backwards:
            raise GradSyncError(
                f"{self._lane.place()} set_batch_weight() came after the step's first backward; "
                "call it before, since gradients are already on their way"
            )
        self._reducer.weight = float(weight)

    @contextmanager
    def join(self) -> Iterator[None]:
        """Let ranks have unequally many batches: who is out of data keeps the others company.

        Inside, every step starts with a one-word vote. A rank that leaves the block shadows the others'
        synchronizations with weight 0 until all have left; then parameters, buffers and optimizer state
        come from a rank that was active last.
        """
        self._joining = True
        try:
            yield
            self._shadow()
        finally:
            self._joining = False
            self._active = None

    def broadcast(self, source: int = 0) -> None:
        """Make parameters, buffers and optimizer state on every rank those of rank `source` of the group."""
        self._meet(Call.BROADCAST)
        tensors = [entry.param.detach() for entry in self._entries] + self._buffers.tensors()
        broadcast_tensors(self._lane, tensors, source, "the model's parameters")
        for optimizer in self._optimizers:
            broadcast_optimizer(self._lane, optimizer, source)

    def drain(self) -> None:
        """Synchronize what was accumulated so far, on every rank: the short last window of `accumulate(k)`."""
        self._num_backwards += 1  # the step() that follows missed nothing
        if self._window.k > 1 or self._unsynchronized:
            self._vote_if_joining()
            self._synchronize_now()

    @property
    def mid_window(self) -> bool:
        """Whether `step()` would find nothing now, because a window of `accumulate(k)` is not full yet.

        Only a GradScaler needs to be asked this: it refuses to step without gradients.
        """
        return self._window.backwards > 0

    def stats(self) -> dict[str, float | int | str | None]:
        """What the last steps cost: medians, as a flat dict; docs/stats.md explains each key."""
        stats = self._reducer.recorder.stats()
        size = self._lane.groups.size
        # What any all-reduce must put on the wire at least, per rank; rings and NCCL send just that.
        stats["sent_nbytes"] = round(2 * (size - 1) / size * int(stats["nbytes"] or 0))
        return stats

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to continue to the bit; local, without communication."""
        return {
            "format": _STATE_FORMAT,
            "step": self._lane.step,
            **self._reducer.state_dict(),
            "window": self._window.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`; every rank calls it, and all must bring the same step and order."""
        if state.get("format") != _STATE_FORMAT:
            raise ValueError(f"this state has format {state.get('format')!r}, this gradsync reads {_STATE_FORMAT}")
        shared = [state[key] for key in ("step", "order", "held", "learned", "unit")]
        digest = hashlib.blake2b(json.dumps(shared).encode(), digest_size=8).digest()
        if len({head.digest for head in self._meet(Call.LOAD, digest)}) > 1:
            raise Disagreement(
                f"{self._lane.place()} load_state_dict() got different states on different ranks, here of step "
                f"{state['step']}; load states that were saved in the same step of the same run"
            )
        self._reducer.load_state_dict(state)
        self._window.load_state_dict(state["window"])
        self._lane.step = int(state["step"])

    def detach(self) -> None:
        """Take everything off again: hooks, groups, threads. Gradients stay as they are."""
        if not self._attached:
            return
        self._attached = False
        if self._hooks is not None:
            self._hooks.remove()
        self._window.show(self._parameters())
        for entry in self._entries:
            if entry.param.grad is not None and entry.param.grad._is_view():
                entry.param.grad = entry.param.grad.clone()
        if not self._failed and self._said_goodbye():
            self._lane.liveness.close()
            self._lane.groups.close()
        else:
            self._lane.liveness.close()

    # For the hooks

    def before_forward(self) -> None:
        """A forward with gradients starts: put right what an aborted backward left, notice changes, vote."""
        if self._in_backward:
            self._drop_aborted()
        self._check_parameters()
        self._vote_if_joining()

    def backward_begins(self) -> None:
        """The gradient of the model's output is known: backward has begun."""
        if not self._in_backward:
            self._begun_at = time.perf_counter()
            self._begin()

    def arrived(self, entry: Entry, param: torch.Tensor) -> None:
        """A parameter's gradient has been accumulated."""
        try:
            if not self._fired:
                self._first_arrival()
            self._reducer.arrived(entry)
        except BaseException as error:
            self._give_up(error)
            raise

    def _first_arrival(self) -> None:
        if not self._in_backward:
            self._begun_at = None
            self._begin()
        self._fired = True
        self._first_at = time.perf_counter()

    def before_step(self, optimizer: Optimizer) -> None:
        """`optimizer.step()` is called: take part in a synchronization that this rank's backward missed."""
        if self._in_backward:
            self._drop_aborted()
        if self._unsynchronized:
            raise GradSyncError(
                f"{self._lane.place()} optimizer.step() would apply gradients that only this rank has: its last "
                "backward ran under no_sync(). Run the last backward of a step outside of it, or call drain()"
            )
        if self._seen_backwards[id(optimizer)] == self._num_backwards:
            # No gradient arrived since the last step: the loss touched no parameter. The others wait for us.
            self._vote_if_joining()
            self._num_backwards += 1
            self._reducer.backwards += self._window.per_batch
            self._end_of_backwards(self._window.per_batch, self._synchronize_now)
        self._seen_backwards[id(optimizer)] = self._num_backwards

    # The way of a backward; see [Three phases]

    def _begin(self) -> None:
        if self._failed:
            raise GradSyncError(f"{self._lane.place()} an earlier synchronization failed; detach and restart the job")
        self._in_backward = True
        self._fired = False
        self._vote_if_joining()
        self._window.show(self._parameters())
        self._reducer.begin(synchronize=not self._no_sync and self._window.closing)
        queue_callback(self._ended)

    def _ended(self) -> None:
        self._in_backward = False
        fired, self._fired = self._fired, False
        if not fired:
            # torch.autograd.grad: no gradient was accumulated, so nothing is to be synchronized.
            if self._window.backwards:
                self._window.hide(self._parameters())
            return
        self._num_backwards += 1
        self._reducer.backwards += 1
        self._notice_late_hooks()
        if self._no_sync:
            self._unsynchronized = True
            return
        self._end_of_backwards(1, self._launch)

    def _end_of_backwards(self, count: int, synchronize: Callable[[], None]) -> None:
        self._window.backwards += count
        if self._window.full:
            synchronize()
        else:
            self._window.hide(self._parameters())

    def _launch(self) -> None:
        with self._failing():
            self._reducer.launch_rest(self._window.micro_batches, source=self._source())
        queue_callback(self._settle)

    def _settle(self) -> None:
        with self._failing():
            self._reducer.settle_first()
        queue_callback(self._finish)

    def _finish(self) -> None:
        with self._failing():
            self._reducer.finish()
        self._window.close()
        self._unsynchronized = False
        self._active = None

    def _synchronize_now(self, flags: Flag = Flag.NONE) -> None:
        """A whole synchronization outside of backward, with the gradients as they stand."""
        self._window.show(self._parameters())
        micro_batches = self._window.micro_batches if self._window.k > 1 else 1
        with self._failing():
            self._reducer.launch_rest(micro_batches, flags, self._source())
            self._reducer.settle_first()
        self._finish()

    def _drop_aborted(self) -> None:
        """The last backward raised before its end: finish its synchronization so that all ranks drop it."""
        self._in_backward = False
        self._num_backwards += 1
        fired, self._fired = self._fired, False
        if self._no_sync or not fired:
            return
        self._synchronize_now(Flag.ABORTED)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        """After a failed synchronization no rank keeps a partial sum, and nothing more is launched."""
        if self._failed or isinstance(error, BackwardAborted):
            return
        self._failed = True
        if not isinstance(error, PeerFault):
            self._lane.fail()
        for entry in self._entries:
            if entry.param.requires_grad:
                entry.param.grad = None

    # Join

    def _vote_if_joining(self) -> None:
        if self._joining and self._active is None:
            self._active = self._vote(active=True)

    def _vote(self, active: bool) -> list[int]:
        heads = self._meet(Call.VOTE, flags=Flag.NONE if active else Flag.SHADOW)
        return [rank for rank, head in enumerate(heads) if not head.flags & Flag.SHADOW]

    def _source(self) -> int:
        """Whose buffers count in this step."""
        return self._active[0] if self._active else 0

    def _shadow(self) -> None:
        if self._in_backward:
            self._drop_aborted()
        if self._active is not None:
            # It voted to be active, but no synchronization came of it: it owes the others one.
            self._synchronize_now(Flag.SHADOW)
        if self._window.backwards:
            warnings.warn(
                f"{self._lane.place()} {self._window.micro_batches} micro-batches of a short last window are lost; "
                "call sync.drain() and optimizer.step() before the end of join()",
                stacklevel=3,
            )
            self._window.close()
        last: list[int] = []
        while active := self._vote(active=False):
            last = self._active = active
            for entry in self._entries:
                entry.param.grad = None
            self._synchronize_now(Flag.SHADOW)
        # Ranks that left last saw no vote in which others were active: those that left before know.
        heads = self._meet(Call.BROADCAST, (last[0] if last else 0).to_bytes(8, "little"))
        self.broadcast(max(int.from_bytes(head.digest, "little") for head in heads))

    # Small things

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((entry.name, entry.param) for entry in self._entries)

    def _check_parameters(self) -> None:
        """Notice parameters that were replaced, frozen or unfrozen since the last step."""
        for entry in self._entries:
            if entry.owner[entry.key] is not entry.param:
                raise GradSyncError(
                    f"{self._lane.place()} parameter {entry.name} was replaced after attach, so its gradient would not "
                    "be averaged; call sync.detach() before you change the model and attach again after"
                )
        trainable = [entry.param.requires_grad for entry in self._entries]
        if trainable != self._trainable:
            self._trainable = trainable
            self._reducer.note_trainable()
            assert self._hooks is not None
            self._hooks.listen(self._entries)

    def _notice_late_hooks(self) -> None:
        """Say once when every gradient arrives at the very end, so that nothing can overlap."""
        if self._begun_at is None or self._late_hooks > 2 or self._reducer.num_buckets < 2:
            return
        now = time.perf_counter()
        late = now - self._begun_at > 5e-3 and now - self._first_at < 0.1 * (now - self._begun_at)
        self._late_hooks = self._late_hooks + 1 if late else 0
        if self._late_hooks == 3 and self.plan.overlap == "backward":
            warnings.warn(
                "all gradients arrive at the end of backward, so communication cannot overlap with it; "
                "if the whole model is under torch.compile, compile its blocks instead (block.compile())",
                stacklevel=2,
            )

    def _said_goodbye(self) -> bool:
        """Wait until every rank is here, so that nobody closes a connection another still reads."""
        try:
            self._meet(Call.DETACH)
        except GradSyncError:
            return False
        return True

    def _meet(self, call: Call, word: bytes = bytes(8), flags: Flag = Flag.NONE) -> list[Head]:
        with self._failing():
            return meet(self._lane, call, len(self._entries), word, flags)
