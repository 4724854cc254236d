"""The tally of what each compressor cost, saved and did to the gradients: sums since attach, read as means per step."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from gradsync.trace.timers import Moment


class CodecSpan(NamedTuple):
    """Something that a bucket's compressor did in a step: encode_s or decode_s."""

    what: str
    start: Moment
    stop: Moment


@dataclass(slots=True)
class CodecTally:
    """The tally of what one compressor cost and saved."""

    way: str = ""  # how its payloads travelled last
    steps: int = 0
    last_step: int = -1
    raw_nbytes: int = 0
    payload_nbytes: int = 0
    sent_nbytes: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0
    events: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=deque)

    def sent(self, step: int, way: str, raw_nbytes: int, payload_nbytes: int, sent_nbytes: float) -> None:
        """A bucket left."""
        if step != self.last_step:
            self.steps, self.last_step = self.steps + 1, step
        self.way = way
        self.raw_nbytes += raw_nbytes
        self.payload_nbytes += payload_nbytes
        self.sent_nbytes += sent_nbytes
        self.settle()  # else events would pile up where nobody asks for stats

    @contextmanager
    def timing(self, what: str, device: torch.device, spans: list[CodecSpan]) -> Iterator[None]:
        """Take the time of what happens inside, for `spans` too: on the host, or on a device without waiting."""
        if device.type == "cuda":
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            yield
            last.record()
            self.events.append((what, first, last))
            spans.append(CodecSpan(what, first, last))
            return
        begun = time.perf_counter()
        yield
        ended = time.perf_counter()
        spans.append(CodecSpan(what, begun, ended))
        self._add(what, ended - begun)

    def settle(self) -> None:
        """Add the times of the device that are known by now."""
        while self.events and self.events[0][2].query():
            what, first, last = self.events.popleft()  # another thread may be adding at the other end
            self._add(what, first.elapsed_time(last) / 1e3)

    def _add(self, what: str, seconds: float) -> None:
        setattr(self, what, getattr(self, what) + seconds)


class Tally:
    """All compressors of a plan, and the last audit."""

    def __init__(self) -> None:
        self.codecs: dict[str, CodecTally] = {}
        self._audit: tuple[int, torch.Tensor] | None = None  # the step, and Σ a², Σ b², Σ ab, Σ (a − b)²

    def codec(self, label: str) -> CodecTally:
        return self.codecs.setdefault(label, CodecTally())

    def audit(self, step: int, averaged: torch.Tensor, exact: torch.Tensor) -> None:
        """Compare what compression made of a bucket with the exact mean; buckets of one step are added up."""
        a, b = averaged.double(), exact.double()
        sums = torch.stack([a.dot(a), b.dot(b), a.dot(b), (a - b).dot(a - b)])
        if self._audit is not None and self._audit[0] == step:
            sums = sums + self._audit[1]
        self._audit = (step, sums)

    def stats(self) -> dict[str, float | int | str | None]:
        """Means per step of each compressor as a flat dict, and what the last audit found."""
        result: dict[str, float | int | str | None] = {}
        for label, codec in list(self.codecs.items()):
            codec.settle()
            steps = max(1, codec.steps)
            result[f"{label}.way"] = codec.way
            result[f"{label}.ratio"] = codec.raw_nbytes / codec.payload_nbytes if codec.payload_nbytes else None
            result[f"{label}.sent_nbytes"] = round(codec.sent_nbytes / steps)
            result[f"{label}.encode_s"] = codec.encode_s / steps
            result[f"{label}.decode_s"] = codec.decode_s / steps
        if self._audit is not None:
            ours, exact, product, error = self._audit[1].tolist()
            result["audit_step"] = self._audit[0]
            result["audit_error"] = math.sqrt(error / exact) if exact > 0 else None
            result["audit_cosine"] = product / math.sqrt(ours * exact) if ours > 0 and exact > 0 else None
        return result
