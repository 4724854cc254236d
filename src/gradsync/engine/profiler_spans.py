"""Our parts of a step by name in `torch.profiler`: a listener that is there while a profiler runs."""

from __future__ import annotations

from typing import Any

import torch

from gradsync.agreement.header import Headers
from gradsync.engine.bucket import Bucket
from gradsync.engine.listeners import Listeners, Moments
from gradsync.transport.pending import Pending


class ProfilerSpans:
    """What happens between two moments shows as "gradsync: launch bucket 3", say."""

    def __init__(self) -> None:
        self._there: Listeners | None = None
        self._span: Any = None
        self._moments: Moments = {
            "packed": self._launches,
            "left": self._launched,
            "header_waits": self._waits_for_header,
            "header_came": self._header_came,
            "bucket_waits": self._waits,
            "bucket_came": self._came,
        }

    def follow(self, listeners: Listeners | None) -> None:
        """Be among these; None: no profiler runs."""
        if self._there is not None:
            self._there.remove(**self._moments)
        self._there = listeners
        if listeners is not None:
            listeners.add(**self._moments)

    def _begin(self, name: str) -> None:
        self._end()  # the last one was left by an exception
        self._span = torch.profiler.record_function(f"gradsync: {name}")
        self._span.__enter__()

    def _end(self) -> None:
        if self._span is not None:
            self._span.__exit__(None, None, None)
        self._span = None

    def _launches(self, bucket: Bucket) -> None:
        self._begin(f"launch bucket {bucket.index}")

    def _launched(self, bucket: Bucket, pending: Pending) -> None:
        self._end()

    def _waits_for_header(self) -> None:
        self._begin("wait for the header")

    def _header_came(self, headers: Headers) -> None:
        self._end()

    def _waits(self, pending: Pending) -> None:
        self._begin(f"wait bucket {pending.bucket}")

    def _came(self, pending: Pending) -> None:
        self._end()
