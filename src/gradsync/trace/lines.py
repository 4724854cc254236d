"""The lines of a rank's trace, as data: what each says. docs/trace.md describes them for readers.

    run      who writes: the first line of every file
    layout   which parameters share a bucket, from this step on
    step     one step: its phases, what it waited and sent; of some, each bucket and each gradient
    clock    how far this host's clock is from rank 0's
    wires    what each TCP connection carried, and how long it was busy with it
    stats    `stats()`, now and then
    choice   `gs.auto()` runs with this plan from here on, and expects this of it
    health   something is wrong with a gradient, a replica or an order
    error    synchronization failed here
    end      this rank left in good order

Times are seconds of the rank's monotonic clock; inside a step they are offsets from its `at`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

FORMAT = 2

Value = float | int | str | None
Json = dict[str, Any]


class StepPart(NamedTuple):
    """A part of a step: input, forward, backward, optimizer, or wait."""

    name: str
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        return self.stop - self.start


class BucketTimes(NamedTuple):
    """A bucket's way through one step; None where it is not known."""

    bucket: int
    ready: float | None  # its last gradient was there
    launched: float | None
    sent: float | None  # it was encoded, and handed to the network
    done: float | None
    wait_from: float | None  # the training thread came to wait for it
    wait_to: float | None
    nbytes: int
    encode_s: float
    decode_s: float


def arrived_by(bucket: BucketTimes) -> float | None:
    """The time at which a bucket was back; where nobody was told (stock DDP), the end of the wait for it."""
    return bucket.wait_to if bucket.done is None else bucket.done


@dataclass(frozen=True, slots=True)
class RunHeader:
    """The rank that writes, and its run."""

    kind: ClassVar[str] = "run"
    rank: int
    world_size: int  # of the group that trains together
    host: str
    pid: int
    started: float  # by the wall clock
    clock: float  # the monotonic clock at that moment
    source: str  # gradsync, or ddp: a stock DistributedDataParallel that is observed
    device: str
    plan: Json | None
    parameters: list[tuple[str, tuple[int, ...], str]] = field(repr=False)  # name, shape, dtype
    gradsync: str = ""
    torch: str = ""
    id: str = ""  # the same on all ranks of a run, and of no other
    format: int = FORMAT
    members: tuple[int, ...] | None = None  # the ranks that train together, where they are not 0 to world_size - 1

    @property
    def group(self) -> Sequence[int]:
        """The ranks that train together."""
        return range(self.world_size) if self.members is None else self.members


class BucketPlan(NamedTuple):
    """The parameters that share a bucket."""

    bucket: int
    parameters: list[int]
    nbytes: int
    compressor: str | None


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The buckets, from this step on."""

    kind: ClassVar[str] = "layout"
    step: int
    buckets: list[BucketPlan]


@dataclass(slots=True)  # not frozen: there is one in every step, and to freeze it takes three times as long
class StepLine:
    """One step, from the end of one synchronization to the end of the next."""

    kind: ClassVar[str] = "step"
    step: int
    at: float
    step_s: float
    phases: list[StepPart]
    exposed_s: float = 0.0
    comm_s: float = 0.0
    nbytes: int = 0
    raw_nbytes: int = 0
    sent_nbytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    counts: bool = True
    held_up_by: str | None = None
    exact_input: bool = False
    buckets: list[BucketTimes] | None = None  # on detailed steps
    gradients: list[tuple[int, float]] | None = None
    header: tuple[float, float] | None = None

    @property
    def own_s(self) -> float:
        """The time this rank worked and did not wait: comparable between ranks, who leave a synchronization at once."""
        return max(0.0, self.step_s - self.seconds("wait"))

    def seconds(self, name: str) -> float:
        """All the time of one phase."""
        return sum(phase.seconds for phase in self.phases if phase.name == name)


@dataclass(frozen=True, slots=True)
class ClockShift:
    """Add `offset_s` to this rank's clock to get rank 0's."""

    kind: ClassVar[str] = "clock"
    step: int
    offset_s: float
    error_s: float


class SocketLine(NamedTuple):
    """The traffic of one connection since the last line."""

    peer: int | None  # its rank, where known
    address: str
    nbytes: int  # that the other side has acknowledged
    busy_s: float  # in which there was something to send
    rtt_s: float
    retransmits: int


@dataclass(frozen=True, slots=True)
class SocketLines:
    """All connections of our groups."""

    kind: ClassVar[str] = "wires"
    step: int
    wires: list[SocketLine]


@dataclass(frozen=True, slots=True)
class Stats:
    """The answer of `stats()`."""

    kind: ClassVar[str] = "stats"
    step: int
    stats: dict[str, Value]


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """The plan with which `gs.auto()` runs from this step on."""

    kind: ClassVar[str] = "choice"
    step: int
    plan: Json
    predicted_step_s: float
    link_bandwidth: float | None = None  # bytes per second that its slowest link gives, by the probe


@dataclass(frozen=True, slots=True)
class Health:
    """Something is wrong: nonfinite, skips, drift, repair, order, loss_scale, late."""

    kind: ClassVar[str] = "health"
    step: int
    what: str
    ranks: list[int]
    parameter: str | None
    count: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Error:
    """Synchronization failed here."""

    kind: ClassVar[str] = "error"
    step: int
    what: str  # the class of the exception
    ranks: list[int]  # whom it names
    bucket: int | None
    text: str


@dataclass(frozen=True, slots=True)
class RankEnd:
    """This rank left in good order."""

    kind: ClassVar[str] = "end"
    step: int
    why: str


Line = RunHeader | BucketLayout | StepLine | ClockShift | SocketLines | Stats | PlanChoice | Health | Error | RankEnd
