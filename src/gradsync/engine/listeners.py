"""Who hears of the moments of a step, while the step knows nobody by name.

The recorder, the trace, the profiler's spans, drift, NaN checks and `gs.auto()` listen, and so do the faults of tests.
A moment that nobody listens to costs nothing: each is a list of functions, called in this order.

    border ─ forward_begins ─ backward_begins ─┬─ arrived, filled ──────────────────┬─ backward_ends
                                               └─ packed, left: per bucket ─────────┘
    settling ─ announce ─ header_left ─ header_waits ─ header_came ─ bucket_waits, bucket_came: per bucket ─ came
    judge ─ averaged ─ synchronized, or step_ended ─ optimizer_begins ─ optimizer_ends
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypedDict, Unpack

from gradsync.agreement.header import Head, Headers
from gradsync.agreement.outcome import Found
from gradsync.transport.pending import Pending

if TYPE_CHECKING:
    from gradsync.engine.bucket import Bucket

Act = Callable[[], None]


class Brought(NamedTuple):
    """All buckets of a synchronization are back."""

    step: int
    in_flight: list[Pending]  # in the order in which they left
    buckets: list[Bucket]  # as they are laid out; the next synchronization may have others
    layout_hash: int  # which is equal as long as they are
    held_up_by: str | None  # the parameter for which full buckets had to wait


class Moments(TypedDict, total=False):
    """What one listener wants to hear of, each as a function."""

    # Nothing of the next synchronization exists yet: other buckets may take the place of these. All ranks come here
    # between the same two synchronizations, before anything else that they do together.
    border: Callable[[], None]
    forward_begins: Callable[[], None]
    backward_begins: Callable[[], None]
    arrived: Callable[[int], None]  # the gradient of this parameter; only where buckets do not leave during backward
    each_arrival: Callable[[int], None]  # likewise wherever it goes: called on the hottest path
    filled: Callable[[Bucket], None]  # its last gradient is there
    packed: Callable[[Bucket], None]  # every gradient lies in it, scaled
    left: Callable[[Bucket, Pending], None]
    backward_ends: Callable[[], None]
    settling: Callable[[], None]  # backward has computed everything: from here on, time is exposed
    announce: Callable[[Head], Head]  # what the header says of this rank; each fills in its own words
    header_left: Callable[[], None]
    header_waits: Callable[[], None]
    header_came: Callable[[Headers], Act | None]  # what is returned all ranks do once the buckets are back
    bucket_waits: Callable[[Pending], None]
    bucket_came: Callable[[Pending], None]
    came: Callable[[Brought], None]
    judge: Callable[[Headers], Found | None]  # what makes this step of no use, to all ranks
    averaged: Callable[[Headers], None]  # the step counts
    synchronized: Callable[[bool], None]  # False: without a backward of this rank, or it came to nothing
    step_ended: Callable[[], None]  # likewise where a pace averages something else than gradients, or later
    optimizer_begins: Callable[[], None]
    optimizer_ends: Callable[[], None]
    joining: Callable[[bool], None]  # a join() block begins, or is over
    failed: Callable[[BaseException], None]  # nothing more will be synchronized


class Listeners:
    """The listeners of one synchronization after the other."""

    def __init__(self) -> None:
        self.border: list[Callable[[], None]] = []
        self.forward_begins: list[Callable[[], None]] = []
        self.backward_begins: list[Callable[[], None]] = []
        self.arrived: list[Callable[[int], None]] = []
        self.each_arrival: list[Callable[[int], None]] = []
        self.filled: list[Callable[[Bucket], None]] = []
        self.packed: list[Callable[[Bucket], None]] = []
        self.left: list[Callable[[Bucket, Pending], None]] = []
        self.backward_ends: list[Callable[[], None]] = []
        self.settling: list[Callable[[], None]] = []
        self.announce: list[Callable[[Head], Head]] = []
        self.header_left: list[Callable[[], None]] = []
        self.header_waits: list[Callable[[], None]] = []
        self.header_came: list[Callable[[Headers], Act | None]] = []
        self.bucket_waits: list[Callable[[Pending], None]] = []
        self.bucket_came: list[Callable[[Pending], None]] = []
        self.came: list[Callable[[Brought], None]] = []
        self.judge: list[Callable[[Headers], Found | None]] = []
        self.averaged: list[Callable[[Headers], None]] = []
        self.synchronized: list[Callable[[bool], None]] = []
        self.step_ended: list[Callable[[], None]] = []
        self.optimizer_begins: list[Callable[[], None]] = []
        self.optimizer_ends: list[Callable[[], None]] = []
        self.joining: list[Callable[[bool], None]] = []
        self.failed: list[Callable[[BaseException], None]] = []

    def add(self, first: bool = False, **moments: Unpack[Moments]) -> None:
        """Let somebody hear of these; `first`: before those who hear of them already."""
        for name, hear in moments.items():  # new lists: somebody may be told just now
            those: list[object] = vars(self)[name]
            vars(self)[name] = [hear, *those] if first else [*those, hear]

    def remove(self, **moments: Unpack[Moments]) -> None:
        """Take back what was added."""
        for name, hear in moments.items():
            vars(self)[name] = [each for each in vars(self)[name] if each != hear]
