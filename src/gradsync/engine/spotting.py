"""Where a NaN or Inf is: in a rank's own gradients before they travel, or in averages that compression made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from gradsync.engine.bucket import Bucket, Entry
from gradsync.guard.findings import Found


class Spot(NamedTuple):
    """The first parameter, by number, and how many elements of its gradient; -1 for none."""

    parameter: int = -1
    num_elements: int = 0


NOWHERE = Spot()


def spot(gradients: Iterable[tuple[Entry, torch.Tensor]]) -> Spot:
    """The first gradient that has one, looking at every element."""
    for entry, grad in gradients:
        if count := int((~grad.to_dense().isfinite()).sum()):
            return Spot(entry.index, count)
    return NOWHERE


def is_finite(flat: torch.Tensor) -> bool:
    """One pass: the sum of what is finite is so too, unless it overflows; then the closer look finds nothing."""
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
