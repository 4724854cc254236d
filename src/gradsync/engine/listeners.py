"""The listeners, who hear of the moments of a step, while the step knows nobody by name.

The recorder, the trace, the profiler's spans, drift, NaN checks and `gs.auto()` listen, and so do the faults of tests.
A moment that nobody listens to costs nothing: each is a list of functions, called in this order.

    border ─ forward_begins ─ backward_begins ─┬─ arrived, filled ──────────────────┬─ backward_ends
                                               └─ packed, left: per bucket ─────────┘
    settling ─ announce ─ header_left ─ header_waits ─ header_came ─ bucket_waits, bucket_came: per bucket ─ came
    judge ─ averaged ─ synchronized, or step_ended ─ optimizer_begins ─ optimizer_ends
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from gradsync.agreement.header import Head, Headers
from gradsync.agreement.outcome import Found
from gradsync.transport.pending import Pending

if TYPE_CHECKING:
    from gradsync.engine.bucket import Bucket

Act = Callable[[], None]
Hear = Callable[..., Any]  # what one listener does at a moment


class Brought(NamedTuple):
    """The buckets of a synchronization, all of them back."""

    step: int
    in_flight: list[Pending]  # in the order in which they left
    buckets: list[Bucket]  # as they are laid out; the next synchronization may have others
    layout_hash: int  # which is equal as long as they are
    held_up_by: str | None  # the parameter for which full buckets had to wait


class Listeners:
    """The listeners of one synchronization after the other: for each moment the functions to call, in this order."""

    # Nothing of the next synchronization exists yet: other buckets may take the place of these. All ranks come here
    # between the same two synchronizations, before anything else that they do together.
    border: list[Callable[[], None]]
    forward_begins: list[Callable[[], None]]
    backward_begins: list[Callable[[], None]]
    arrived: list[Callable[[int], None]]  # a parameter's gradient; only where buckets do not leave during backward
    each_arrival: list[Callable[[int], None]]  # likewise wherever it goes: called on the hottest path
    filled: list[Callable[[Bucket], None]]  # its last gradient is there
    packed: list[Callable[[Bucket], None]]  # every gradient lies in it, scaled
    left: list[Callable[[Bucket, Pending], None]]
    backward_ends: list[Callable[[], None]]
    settling: list[Callable[[], None]]  # backward has computed everything: from here on, time is exposed
    announce: list[Callable[[Head], Head]]  # what the header says of this rank; each fills in its own words
    header_left: list[Callable[[], None]]
    header_waits: list[Callable[[], None]]
    header_came: list[Callable[[Headers], Act | None]]  # what is returned all ranks do once the buckets are back
    bucket_waits: list[Callable[[Pending], None]]
    bucket_came: list[Callable[[Pending], None]]
    came: list[Callable[[Brought], None]]
    judge: list[Callable[[Headers], Found | None]]  # what makes this step of no use, to all ranks
    averaged: list[Callable[[Headers], None]]  # the step counts
    synchronized: list[Callable[[bool], None]]  # False: without a backward of this rank, or it came to nothing
    step_ended: list[Callable[[], None]]  # likewise where a pace averages something else than gradients, or later
    optimizer_begins: list[Callable[[], None]]
    optimizer_ends: list[Callable[[], None]]
    joining: list[Callable[[bool], None]]  # a join() block begins, or is over
    failed: list[Callable[[BaseException], None]]  # nothing more will be synchronized

    def __init__(self) -> None:
        for name in Listeners.__annotations__:
            vars(self)[name] = []

    def add(self, first: bool = False, **moments: Hear) -> None:
        """Let somebody hear of these; `first`: before those who hear of them already."""
        for name, hear in moments.items():  # new lists: somebody may be told just now
            those: list[Hear] = vars(self)[name]
            vars(self)[name] = [hear, *those] if first else [*those, hear]

    def remove(self, **moments: Hear) -> None:
        """Take back what was added."""
        for name, hear in moments.items():
            vars(self)[name] = [each for each in vars(self)[name] if each != hear]


def moments_of(listener: object) -> dict[str, Hear]:
    """Return what somebody hears of whose methods have the names of moments."""
    return {name: getattr(listener, name) for name in Listeners.__annotations__ if hasattr(listener, name)}
