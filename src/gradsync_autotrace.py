"""Tracing without touching code: with GRADSYNC_TRACE=folder, every DistributedDataParallel of a script is observed.

PyTorch calls `install` at the end of `import torch`, as it does for every installed package that offers an entry point
of the group "torch.backends". It is a module of its own so that without the variable nothing of gradsync is imported.
"""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any


def install() -> None:
    """Have the constructor of DistributedDataParallel call `gradsync.observe`, if the variable is set."""
    if not os.environ.get("GRADSYNC_TRACE"):
        return
    from torch.nn.parallel import DistributedDataParallel

    make = DistributedDataParallel.__init__

    @functools.wraps(make)
    def make_and_observe(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _observe(self)

    DistributedDataParallel.__init__ = make_and_observe  # type: ignore[method-assign]


def _observe(ddp: Any) -> None:
    import gradsync

    try:
        gradsync.observe(ddp)  # the model's hooks keep it alive
    except Exception as error:  # a trace must never end a training that would run without it
        warnings.warn(f"GRADSYNC_TRACE: this DistributedDataParallel is not traced: {error}", stacklevel=3)
