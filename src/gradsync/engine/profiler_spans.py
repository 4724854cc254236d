"""Our parts of a step by name in `torch.profiler`: a listener that is there while a profiler runs."""

from __future__ import annotations

from typing import Any

import torch

from gradsync.engine.listeners import Hear, Listeners


class ProfilerSpans:
    """The spans of a profiler: what happens between two moments shows as "gradsync: launch bucket 3", say."""

    def __init__(self) -> None:
        self._there: Listeners | None = None
        self._span: Any = None
        self._moments: dict[str, Hear] = {
            "packed": lambda bucket: self._begin(f"launch bucket {bucket.index}"),
            "left": lambda bucket, pending: self._end(),
            "header_waits": lambda: self._begin("wait for the header"),
            "header_came": lambda headers: self._end(),
            "bucket_waits": lambda pending: self._begin(f"wait bucket {pending.bucket}"),
            "bucket_came": lambda pending: self._end(),
        }

    def follow(self, listeners: Listeners | None) -> None:
        """Join these listeners; None: no profiler runs."""
        if self._there is not None:
            self._there.remove(**self._moments)
        self._there = listeners
        if listeners is not None:
            listeners.add(False, **self._moments)

    def _begin(self, name: str) -> None:
        self._end()  # the last one was left by an exception
        self._span = torch.profiler.record_function(f"gradsync: {name}")
        self._span.__enter__()

    def _end(self) -> None:
        if self._span is not None:
            self._span.__exit__(None, None, None)
        self._span = None
