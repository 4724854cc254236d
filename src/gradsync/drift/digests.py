"""Whether the replicas are still alike: a share of each is digested in every step, and all of it within 64 steps.

    synchronization    7            8            9
    digested           share 7      share 8      share 9        while the buckets of that step travel
    header             digest of 6  digest of 7  digest of 8    GPU: of the step before that one, without waiting
    compared                        share 7      share 8        unequal: every rank reads so, and all look closer

Digests are taken at the end of backward, when parameters and optimizer state are at rest on every rank: nobody steps
before its gradients are there. The closer look is `diagnosis`; it happens when all ranks are at the same place.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradsync.agreement.header import NO_REPLICA_DIGEST, Headers
from gradsync.drift.replica_state import Piece, cut, replica_tensors_of
from gradsync.engine.bucket import Entry
from gradsync.kernels import digest

NUM_SHARES = 60  # with the delay of the digests everything is compared within 64 steps
_LAG_ON_HOST, _LAG_ON_DEVICE = 1, 2  # synchronizations after which a digest is in the header
_SMALL_NBYTES = 1 << 20  # pieces on a GPU that are digested together


class DigestMismatch(NamedTuple):
    """Digests that differed."""

    step: int  # when they were taken
    generation: int
    words: list[bytes]  # every rank's
    layout: int
    pieces: list[Piece]  # what they were of, here


@dataclass
class DigestReading:
    """Digests of one share, perhaps still being computed on a device."""

    step: int
    generation: int
    layout: int  # hash of what all shares are of
    pieces: list[Piece]
    known: list[int]
    pending: torch.Tensor | None  # in pinned memory
    events: list[torch.cuda.Event]
    loss_scale: float

    def word(self) -> bytes:
        """8 bytes, never those that stand for nothing."""
        numbers = [self.layout, *self.known]
        if self.pending is not None:
            for event in self.events:
                event.synchronize()  # steps ago: it has passed, unless the host is far ahead
            numbers += [number & (1 << 64) - 1 for number in self.pending[:-1].tolist()]
            self.loss_scale = float(self.pending[-1:].view(torch.float64))
        return (digest.joined(numbers) or 1).to_bytes(8, "little")


class ReplicaDigests:
    """This rank's digests; it lives while the plan changes."""

    def __init__(self, entries: Sequence[Entry], optimizers: Sequence[Optimizer], scaler: GradScaler | None) -> None:
        self.entries = entries
        self.optimizers = optimizers
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.generation = 0  # digests of an earlier one say nothing any more
        self._readings: deque[DigestReading] = deque()
        self._announced: deque[DigestReading | None] = deque()  # whose words are in headers under way
        self._shares: list[list[Piece]] = []
        self._layout = 0
        self._seen: list[tuple[int, int]] = []  # of each optimizer: which dict its state is, and of how many
        on_device = any(entry.param.is_cuda for entry in entries)
        self._lag = _LAG_ON_DEVICE if on_device else _LAG_ON_HOST

    # In every step

    def take(self, step: int) -> None:
        """Digest this step's share; on a GPU only ask for it."""
        state = [(id(optimizer.state), len(optimizer.state)) for optimizer in self.optimizers]
        if not self._shares or state != self._seen or step % NUM_SHARES == 0:
            self._list(state)
        self._readings.append(self._read(step, self._shares[step % NUM_SHARES]))

    def announce(self) -> tuple[bytes, float]:
        """What the next header says: the digest whose turn it is, and the loss scale."""
        reading = self._readings.popleft() if len(self._readings) >= self._lag else None
        self._announced.append(reading)
        if reading is None:
            return NO_REPLICA_DIGEST, self._scale_on_host()
        word = reading.word()
        return word, self._scale_on_host() or reading.loss_scale

    def hear(self, headers: Headers) -> DigestMismatch | None:
        """Compare what all ranks announced in one header, the oldest that was not heard."""
        words, reading = [head.replica_digest for head in headers.heads], self._announced.popleft()
        if reading is None or NO_REPLICA_DIGEST in words or all(word == words[0] for word in words):
            return None
        return DigestMismatch(reading.step, reading.generation, words, reading.layout, reading.pieces)

    def forget(self) -> None:
        """What was digested so far says nothing any more: replicas were changed, or may differ for a while."""
        self.generation += 1
        self._readings.clear()

    def replaced(self) -> None:
        """Entries have other parameters: the next share is cut from these. Digests under way still count."""
        self._shares = []

    # How

    def _list(self, state: list[tuple[int, int]]) -> None:
        held = replica_tensors_of(self.entries, self.optimizers)
        self._seen = state
        self._shares = cut(held, NUM_SHARES)
        self._layout = zlib.crc32("\n".join(each.name for each in held).encode())
        self._layout ^= zlib.crc32(repr([[(p.start, p.stop) for p in share] for share in self._shares]).encode())

    def _read(self, step: int, pieces: list[Piece]) -> DigestReading:
        known: list[int] = []
        distant: dict[torch.device, list[torch.Tensor]] = {}
        for piece in pieces:
            taken = piece.take()
            if isinstance(taken, int):
                known.append(taken)
            elif taken.is_cuda:
                distant.setdefault(taken.device, []).append(taken)
            else:
                known.append(digest.digest(taken))
        reading = DigestReading(step, self.generation, self._layout, pieces, known, None, [], 0.0)
        scale = self._scale_on_device()
        if distant or scale is not None:
            _ask(reading, distant, torch.zeros((), dtype=torch.float32, device="cpu") if scale is None else scale)
        return reading

    def _scale_on_device(self) -> torch.Tensor | None:
        """The loss scale, where only a device knows it."""
        scale = None if self.scaler is None else self.scaler._get_scale_async()
        return scale if scale is not None and scale.is_cuda else None

    def _scale_on_host(self) -> float:
        """The loss scale, where the host knows it; otherwise 0."""
        return 0.0 if self.scaler is None or self._scale_on_device() is not None else float(self.scaler.get_scale())


@torch.no_grad()
def _ask(reading: DigestReading, distant: dict[torch.device, list[torch.Tensor]], scale: torch.Tensor) -> None:
    """Start the digests of what is on devices, and their way to the host."""
    parts = [digest.launch(part) for parts in distant.values() for part in _together(parts)]
    pending = torch.empty(len(parts) + 1, dtype=torch.int64, pin_memory=True, device="cpu")
    for place, part in zip(pending, [*parts, scale.double().view(torch.int64).reshape(())], strict=True):
        place.copy_(part, non_blocking=True)
    reading.pending = pending
    for device in {part.device for part in [*parts, scale] if part.is_cuda}:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        reading.events.append(event)


def _together(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Small ones as one tensor of bytes: a kernel for each would cost more than it does."""
    small = [part for part in parts if part.numel() * part.element_size() < _SMALL_NBYTES]
    large = [part for part in parts if part.numel() * part.element_size() >= _SMALL_NBYTES]
    return [*large, torch.cat([part.contiguous().view(torch.uint8) for part in small])] if small else large
