"""A bucket of DDP leaves, seen from outside, as soon as the last of its gradients is there, and the buckets before it.

    gradient    5   4 │ 3   2 │ 1   0
    bucket          0 └ leaves  1 └ leaves    in their order: a full one waits for those before it

A communication hook would be told, and also when the sum of a bucket was done. But a hook changes DDP: who divides,
and by what, which layouts travel, which other hook may be registered, how errors read. So there is none.

Which parameters share a bucket DDP says in its logging data: sizes from the beginning, and names of parameters once
it has laid the buckets out anew, after the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradsync.engine.bucket import GradEntry
from gradsync.trace.lines import BucketPlan

OnLaunch = Callable[[int], None]


class BucketLaunches:
    """Counts the gradients of a step."""

    def __init__(self, entries: Sequence[GradEntry], on_launch: OnLaunch) -> None:
        """`on_launch` is called with each bucket that leaves. DDP averages what is trained when it is made."""
        self.layout: list[BucketPlan] = []  # empty while it is not known
        self.settled = False  # DDP has laid its buckets out for good
        self._on_launch = on_launch
        self._trained = [entry.index for entry in entries if entry.param.requires_grad]
        self._nbytes = {entry.index: entry.param.numel() * entry.param.element_size() for entry in entries}
        self._bucket_of: list[int | None] = [None] * len(entries)
        self.begin()

    def begin(self) -> None:
        """A step that synchronizes begins."""
        self._missing = [len(bucket.parameters) for bucket in self.layout]
        self._arrived = bytearray(len(self._bucket_of))
        self._next = 0

    def arrived(self, index: int) -> None:
        """The gradient of this parameter is there."""
        bucket = self._bucket_of[index]
        if bucket is None or self._arrived[index]:
            return
        self._arrived[index] = 1
        self._missing[bucket] -= 1
        if bucket == self._next and not self._missing[bucket]:
            self._launch_full()

    def finish(self) -> None:
        """Backward is over: what is not full waited for parameters that were not used."""
        self._missing = [0] * len(self._missing)
        self._launch_full()

    def _launch_full(self) -> None:
        while self._next < len(self._missing) and not self._missing[self._next]:
            self._on_launch(self._next)
            self._next += 1

    # Which parameters share one

    def read(self, said: Mapping[str, Any]) -> None:
        """Learn, between two steps, from what DDP logs."""
        if "rebuilt_per_bucket_param_indices" in said:
            members = [_numbers(bucket, " ") for bucket in said["rebuilt_per_bucket_param_indices"].split(",")]
            self.settled = True
            self._lay_out(members, _numbers(said.get("rebuilt_bucket_sizes", ""), ","))
        elif not self.layout:
            sizes = _numbers(said.get("bucket_sizes", ""), ",")
            self._lay_out(cut([self._nbytes[index] for index in self._trained], sizes), sizes)

    def _lay_out(self, members: list[list[int]], sizes: list[int]) -> None:
        self._bucket_of = [None] * len(self._bucket_of)
        self.layout = []
        known = range(len(self._trained))
        if len(sizes) == len(members) and all(number in known for bucket in members for number in bucket):
            named = [[self._trained[number] for number in bucket] for bucket in members]
            self.layout = [BucketPlan(i, each, sizes[i], None) for i, each in enumerate(named)]
            for bucket in self.layout:
                for index in bucket.parameters:
                    self._bucket_of[index] = bucket.bucket
        self.begin()


def cut(nbytes: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Return which parameters share a bucket, told by the sizes of all, the first bucket holding the last parameters.

    Empty where that cannot be told: DDP sorts by dtype.

    >>> cut([4, 4, 8, 2], [10, 8]), cut([4, 4], [6, 2])
    ([[2, 3], [0, 1]], [])
    """
    buckets: list[list[int]] = []
    end = len(nbytes)
    for size in sizes:
        start, missing = end, size
        while start > 0 and missing > 0:
            start -= 1
            missing -= nbytes[start]
        if missing:
            return []
        buckets.append([*range(start, end)])
        end = start
    return buckets if not end else []


def _numbers(text: str, separator: str) -> list[int]:
    return [int(each) for each in text.split(separator) if each.strip()]
