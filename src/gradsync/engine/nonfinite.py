"""Two listeners that look at gradients: for NaN and Inf, and for ranks that all see the same data.

A NaN or Inf is in a rank's own gradients before they travel, or in averages that compression made. The first gradients
tell whether ranks see different data: if they are equal to the bit, they do not.
"""

from __future__ import annotations

import hashlib
import struct
import warnings
from collections.abc import Iterable
from typing import NamedTuple

import torch

from gradsync.agreement.header import NO_DIGEST, Head, Headers
from gradsync.agreement.outcome import Found
from gradsync.engine.bucket import Bucket, GradEntry
from gradsync.engine.step import Synchronization


class NonfinitePlace(NamedTuple):
    """The first parameter, by number, and how many elements of its gradient; -1 for none."""

    parameter: int = -1
    num_elements: int = 0


_NOWHERE = NonfinitePlace()


class NonfiniteCheck:
    """Listens where no NaN or Inf is allowed: finds the first one, tells the others, judges the averages."""

    def __init__(self, synchronization: Synchronization) -> None:
        self._synchronization = synchronization
        self._first = _NOWHERE
        synchronization.listeners.add(packed=self._look, announce=self._announce, judge=self._judge)

    def _look(self, bucket: Bucket) -> None:
        # In the first step buckets leave after the header, which said it already; the next one is not to say it again.
        learned = self._synchronization.bucket_order.learned
        if learned and self._first is _NOWHERE and not is_finite(bucket.flat):
            self._first = first_nonfinite((entry, entry.view) for entry in bucket.entries)

    def _announce(self, head: Head) -> Head:
        synchronization, first = self._synchronization, self._first
        if first is _NOWHERE and synchronization.scale:
            # What is in no bucket yet: in the first step nothing is.
            order = synchronization.bucket_order
            left = order.unbucketed if order.learned else synchronization.entries
            first = first_nonfinite((e, e.param.grad) for e in left if e.param.grad is not None)
        self._first = _NOWHERE
        return head._replace(nonfinite=first.parameter, num_nonfinite=first.num_elements)

    def _judge(self, headers: Headers) -> Found | None:
        return made_by_compression(self._synchronization.bucket_order.buckets)


def first_nonfinite(gradients: Iterable[tuple[GradEntry, torch.Tensor]]) -> NonfinitePlace:
    """The first gradient that has one, looking at every element."""
    for entry, grad in gradients:
        if count := int((~grad.to_dense().isfinite()).sum()):
            return NonfinitePlace(entry.index, count)
    return _NOWHERE


def is_finite(flat: torch.Tensor) -> bool:
    """Look in one pass: a sum of finite numbers is finite, unless it overflows; then the closer look finds nothing."""
    return bool(flat.sum().isfinite())


def made_by_compression(buckets: Iterable[Bucket]) -> Found | None:
    """A NaN or Inf in the average of finite gradients: averages are alike, so all ranks find the same."""
    for bucket in buckets:
        if bucket.choice.codec is not None and not is_finite(bucket.flat):
            for entry in bucket.entries:
                if count := int((~entry.view.isfinite()).sum()):
                    text = f"{bucket.choice.label} made NaN or Inf of the average gradient of {entry.name}"
                    return Found(text, [], entry.name, count)
    return None


_AT_ONCE = 1 << 20  # elements: torch first makes a copy of what it adds up in a wider type
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SameDataCheck:
    """Listens to the first synchronization: every rank says a digest of its gradients."""

    def __init__(self, synchronization: Synchronization) -> None:
        self._synchronization = synchronization
        synchronization.listeners.add(announce=self._announce, averaged=self._compare)

    def _announce(self, head: Head) -> Head:
        if not self._synchronization.bucket_order.learned:
            return head._replace(digest=digest_of(self._synchronization.entries))
        self._synchronization.listeners.remove(announce=self._announce, averaged=self._compare)
        return head

    def _compare(self, headers: Headers) -> None:
        if not self._synchronization.bucket_order.learned and self._synchronization.lane.groups.rank == 0:
            warn_if_same_data(headers)


def digest_of(entries: list[GradEntry]) -> bytes:
    """The digest of the local gradients, to see whether two ranks had the same; zeros if there is none."""
    sums = []
    for entry in entries:
        grad = entry.param.grad
        if grad is not None and not grad.is_sparse and grad.numel():
            real = torch.view_as_real(grad) if grad.is_complex() else grad
            parts = real.contiguous().flatten().view(_BITS[real.element_size()]).split(_AT_ONCE)
            sums.append(int(torch.stack([part.sum(dtype=torch.int64) for part in parts]).sum()))
    if not any(sums):
        return NO_DIGEST
    return hashlib.blake2b(struct.pack(f"<{len(sums)}q", *sums), digest_size=8).digest()


def warn_if_same_data(headers: Headers) -> None:
    """Every rank sees the same data if all first gradients are the same."""
    if headers.size > 1 and headers.digest not in (None, NO_DIGEST):
        warnings.warn(
            "the first gradients are bitwise equal on all ranks: every rank seems to see the same data. "
            "Give each its own share, for example with torch.utils.data.DistributedSampler",
            stacklevel=2,
        )
