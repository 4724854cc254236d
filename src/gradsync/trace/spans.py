"""Our parts of a step by name in `torch.profiler`; nothing, and no cost, while it does not run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_NOTHING: AbstractContextManager[None] = nullcontext()


def span(name: str, bucket: int = -1) -> AbstractContextManager[object]:
    """What happens inside shows as "gradsync: launch bucket 3", say."""
    if not torch._C._autograd._profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(f"gradsync: {name}" + (f" bucket {bucket}" if bucket >= 0 else ""))
