"""Tracing without touching code: with GRADSYNC_TRACE=folder, every DistributedDataParallel of a script is observed.

PyTorch calls `install` at the end of `import torch`, as it does for every installed package that offers an entry point
of the group "torch.backends". It is a module of its own so that without the variable nothing of gradsync is imported.
"""

from __future__ import annotations

import functools
import os
import sys
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


_absent: set[int] = set()  # ranks that did not come to the first: nobody waits for them once more


def _observe(ddp: Any) -> None:
    """A trace must never end a training that would run without it, nor hold it up for long."""
    try:
        from torch.distributed import get_process_group_ranks

        if _absent.isdisjoint(get_process_group_ranks(ddp.process_group)):
            from gradsync.integrations.observe import observe_all_or_none

            observe_all_or_none(ddp)
    except Exception as error:
        _absent.update(getattr(error, "ranks", ()) if type(error).__name__ == "NotTogether" else ())
        _say(f"GRADSYNC_TRACE: this DistributedDataParallel is not traced, and trains on: {error}")


def _say(text: str) -> None:
    try:
        warnings.warn(text, stacklevel=4)
    except Warning:  # they are errors here
        sys.stderr.write(f"gradsync: {text}\n")
