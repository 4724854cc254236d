"""The contract of every pace: what happens after a backward, before and after a step; what it stores, how it is saved.

    before_forward ─▶ forward ─▶ before_backward ─▶ backward ─▶ after_backward ─▶ optimizer.step ─▶ after_step
                                                                (.grad holds what the optimizer is to apply;
                                                                 None: it applies nothing)

Note [The clock]
    Counts backwards, not calls of `optimizer.step()`: a GradScaler that finds an infinity calls none, on this rank
    only, and ranks would lose count. So what is due after a step happens after it if there is one, and otherwise
    before the next forward. `Due` says whether something is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradsync.agreement.calls import Call
from gradsync.agreement.header import Headers
from gradsync.agreement.outcome import HealthLog
from gradsync.errors import GradSyncError
from gradsync.exchange.choose_route import ExactSum
from gradsync.exchange.flat_sets import FlatSet
from gradsync.exchange.sender import Sender
from gradsync.plan.guard import Guard
from gradsync.plan.sync_plan import Plan
from gradsync.trace import Recorder
from gradsync.transport.lane import Lane

State = dict[str, torch.Tensor]
Stats = dict[str, float | int | str | None]


class BufferBroadcast(Protocol):
    """The model's buffers, which go from one rank to all with every synchronization."""

    def tensors(self) -> list[torch.Tensor]: ...
    def launch(self, lane: Lane, source: int) -> None: ...
    def finish(self, lane: Lane) -> None: ...


class DriftCheck(Protocol):
    """A check of replicas, for paces that keep them equal: what a header says of this one, and what is heard."""

    def announce(self) -> tuple[bytes, float]: ...
    def take(self, step: int, silent: bool = False) -> None: ...
    def hear(self, headers: Headers, lane: Lane) -> Callable[[], None]: ...


class PaceContext(NamedTuple):
    """The context in which a pace works; the same on every rank."""

    plan: Plan
    parent: dist.ProcessGroup
    lane: Lane
    exact: ExactSum
    sender: Sender
    parameters: Sequence[tuple[str, torch.nn.Parameter]]
    optimizers: Sequence[Optimizer]
    scaler: GradScaler | None
    buffers: BufferBroadcast
    guard: Guard
    num_marks: int  # parameters that the header counts
    indices: count[int]  # for flat buckets
    recorder: Recorder
    health_log: HealthLog
    drift_check: DriftCheck

    def flat_set(self, named: Sequence[tuple[str, torch.Tensor]], num_flat_parts: int = 1) -> FlatSet:
        """Flat memory for these tensors, of the forms that travel; every rank calls this at once."""
        return FlatSet(named, self.exact, self.sender, self.indices, self.plan.bucket_bytes, num_flat_parts)


class SavedPace(NamedTuple):
    """The state that a pace stores: equal on all ranks, and this rank's own."""

    shared: State
    own: State


def numbers_in_state(prefix: str, **numbers: int) -> State:
    """Whole numbers as a state keeps them."""
    return {f"{prefix}.{key}": torch.tensor(number, device="cpu") for key, number in numbers.items()}


def below(state: State, prefix: str) -> State:
    """Return what a state keeps under a prefix, without it."""
    return {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}


class OpenWindow(NamedTuple):
    """Gradients of an open window, out of sight."""

    backwards: int  # since it began
    hidden: State
    num_shown: int = 0  # how many more a backward has begun to add to, so that they are not what they were


class Pace(ABC):
    """A pace at work. The engine calls it; all ranks call the same, in the same order."""

    engine_averages = False  # gradients, in the backward for which `after_backward` says so
    replicas_differ = False  # between synchronizations, by design
    k = 1  # micro-batches in a mean of gradients
    per_batch = 1  # backward calls in a micro-batch
    backwards = 0  # in the window that is open
    dropped = False  # whether its last average came to nothing on every rank

    @property
    def streams(self) -> bool:
        """True if the engine averages the gradients of the next backward, while it runs."""
        return False

    def before_forward(self) -> None:  # noqa: B027 (most paces do nothing here)
        """A forward with gradients begins."""

    def before_backward(self) -> None:  # noqa: B027
        """A backward begins; what stands in `.grad` will be added to."""

    @abstractmethod
    def after_backward(self, count: int, aborted: int) -> bool:
        """Act after `count` backwards; `aborted`: what raised, if anything. True: the engine averages gradients."""

    def put_away(self) -> None:  # noqa: B027
        """A backward ended without a gradient: hide again what was shown before it."""

    def averaged(self) -> None:  # noqa: B027
        """The engine has averaged the gradients, or dropped them."""

    def before_step(self, optimizer: Optimizer) -> None:  # noqa: B027
        """An optimizer is about to step; called from inside its `step()`."""

    def after_step(self, optimizer: Optimizer) -> None:  # noqa: B027
        """An optimizer has stepped."""

    def before_meeting(self, call: Call) -> None:  # noqa: B027
        """All ranks are about to do something together that is not the pace's own: broadcast, load, detach."""

    def drain(self) -> bool:
        """Bring to an end what is under way. True: `.grad` holds something for one more step."""
        return False

    @property
    def mid_window(self) -> bool:
        """True if `step()` would find nothing now."""
        return False

    @property
    def replicas_equal(self) -> bool:
        """True if all ranks hold the same parameters now."""
        return True

    def describe(self, bucket: int) -> str:
        """Return what travels under this number, for people."""
        return f"bucket {bucket}"

    def stats(self) -> Stats:
        """Return what the pace measured."""
        return {}

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches in the window now, the last one perhaps begun only."""
        return 1

    def open_window(self) -> OpenWindow:
        """Return what a window in the middle must not lose over a checkpoint; apart, for a saver may leave it out."""
        return OpenWindow(0, {})

    def has_room_for(self, backwards: int) -> bool:
        """Return whether a window of this pace is still open after so many backwards."""
        return backwards == 0

    def resume_window(self, window: OpenWindow) -> None:  # noqa: B027
        """Go on in that window."""

    def rescale(self, ratio: torch.Tensor) -> None:  # noqa: B027
        """The loss scale was multiplied by this."""

    def settle(self) -> None:  # noqa: B027
        """Wait for what is under way, and keep it; start nothing."""

    def state(self) -> SavedPace:
        """Copies of what it stores. May wait for what is under way, starts nothing."""
        return SavedPace({}, {})

    def load(self, saved: SavedPace) -> None:  # noqa: B027
        """Continue from it; every rank calls this at once."""

    def reset(self) -> None:  # noqa: B027
        """Parameters were made equal from outside: begin from them."""

    def close(self, together: bool) -> None:  # noqa: B027
        """Leave; nothing may stay hidden. `together` if all ranks came to this."""


class PaceMoments(NamedTuple):
    """The acts of a pace at moments at which most do nothing; None: it does not even hear of them."""

    before_forward: Callable[[], None] | None
    before_step: Callable[[Optimizer], None] | None
    after_step: Callable[[Optimizer], None] | None

    @classmethod
    def of(cls, pace: Pace) -> PaceMoments:
        kind = type(pace)
        return cls(
            None if kind.before_forward is Pace.before_forward else pace.before_forward,
            None if kind.before_step is Pace.before_step else pace.before_step,
            None if kind.after_step is Pace.after_step else pace.after_step,
        )


class Due:
    """Something is to be done once all optimizers have stepped."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._all = {id(optimizer) for optimizer in optimizers}
        self._missing: set[int] | None = None  # who has not stepped yet; None: nothing is due

    def __bool__(self) -> bool:
        return self._missing is not None

    def set(self) -> None:
        """A backward has ended after which it is due."""
        self._missing = set(self._all)

    def clear(self) -> None:
        """Note that what was due is done."""
        self._missing = None

    def waits_for(self, optimizer: Optimizer) -> bool:
        """Return whether this optimizer has not stepped yet."""
        return self._missing is not None and id(optimizer) in self._missing

    def done_by(self, optimizer: Optimizer) -> bool:
        """An optimizer has stepped: whether it was the last one."""
        if self._missing is None:
            return False
        self._missing.discard(id(optimizer))
        return not self._missing

    def check_done(self, lane: Lane) -> None:
        """A backward begins: raise if it was not done before the forward, since parameters cannot change between."""
        if self:
            raise GradSyncError(
                f"{lane.place()} a backward begins, but parameters were to be exchanged after the last one, before "
                "this forward. Call the model itself, not its parts; if a step takes several backwards, run all but "
                "the last under sync.no_sync()"
            )
