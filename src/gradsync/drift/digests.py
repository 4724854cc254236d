"""The digests that tell whether replicas are still alike: a share in every step, and all within 64 steps.

    synchronization    7            8            9
    digested           share 7      share 8      share 9        while the buckets of that step travel
    header             digest of 6  digest of 7  digest of 8    GPU: of the step before that one, or see [Later]
    compared                        share 7      share 8        unequal: every rank reads so, and all look closer

Digests are taken at the end of backward, when parameters and optimizer state are at rest on every rank: nobody steps
before its gradients are there. The closer look is `diagnosis`; it happens when all ranks are at the same place.

Note [Later]
    The host is ahead of its GPU, sometimes by several steps, and must not wait for it. So a rank whose GPU still
    computes the digest whose turn it is says just that, and then every rank, which reads it in the same header, says
    that digest again in its next one. Digests are compared as late as the slowest GPU is behind its host, each once.

What all ranks must hold alike (parameters, optimizer state, hyper-parameters) is cut into shares:

    replica tensors   │ lr of group 0 │ … │ w ─────────────── │ b │ exp_avg of w ──── │ …
    shares     │ 0    │ 1    │ 2    │ 3    │ 4    │ 5    │ …                       equal bytes, one per step

What it holds is looked up when it is needed: an optimizer makes its state late, and loading a checkpoint replaces it.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradsync.agreement.header import DIGEST_COMES_LATER, NO_REPLICA_DIGEST, Headers, Note
from gradsync.engine.bucket import GradEntry
from gradsync.kernels import digest
from gradsync.transport.cuda_driver import has_happened
from gradsync.transport.current_stream import current_stream

NUM_SHARES = 60  # with the delay of the digests everything is compared within 64 steps
_LAG_ON_HOST, _LAG_ON_DEVICE = 1, 2  # synchronizations after which a digest is in the header at the earliest
_MOST_WAITING = 2 * NUM_SHARES  # digests that are kept until they are there: far more than a host is ahead
_SMALL_NBYTES = 4 << 20  # pieces on a GPU that are digested together: a launch costs more than to copy them


_NUM_RESERVED = 2  # words, from 0 on, that stand for something else: no digest, and one that comes later
_VALUE_NBYTES = 8  # what a plain value counts for


class ReplicaTensor(NamedTuple):
    """A tensor or a plain value that all replicas hold alike."""

    name: str  # for people, and by which ranks compare
    parameter: str | None  # whose it is
    owner: torch.nn.Parameter | Optimizer
    key: tuple[Any, ...]  # where it is in an optimizer: a parameter and a word, or the number of a group and a word
    number: int  # of the optimizer; -1 for a parameter

    @property
    def value(self) -> Any:
        """The tensor or plain value as it is now; None if it is not there."""
        if not isinstance(self.owner, Optimizer):
            return self.owner.detach()
        place, word = self.key
        if isinstance(place, int):
            return self.owner.param_groups[place].get(word) if place < len(self.owner.param_groups) else None
        return _state_of(self.owner, place).get(word)

    @property
    def form(self) -> str:
        """The kind of value without its elements: equal forms have equally many.

        Plain values are their own form.
        """
        value = self.value
        if isinstance(value, torch.Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return repr(value)

    def digest(self) -> int:
        """The digest of the whole."""
        value = self.value
        return digest.digest(value) if isinstance(value, torch.Tensor) else zlib.crc32(repr(value).encode())


class Piece(NamedTuple):
    """Some elements of a tensor, or a plain value."""

    replica_tensor: ReplicaTensor
    start: int
    stop: int

    def take(self) -> torch.Tensor | int:
        """The elements themselves; of a plain value its digest."""
        value = self.replica_tensor.value
        if not isinstance(value, torch.Tensor):
            return self.replica_tensor.digest()
        return value.detach().reshape(-1)[self.start : self.stop]

    def digest(self) -> int:
        taken = self.take()
        return taken if isinstance(taken, int) else digest.digest(taken)


def replica_tensors_of(entries: Sequence[GradEntry], optimizers: Sequence[Optimizer]) -> list[ReplicaTensor]:
    """Return what a replica holds, in an order that is equal on every rank; what may cause the rest comes first."""
    titles = [
        type(optimizer).__name__ + (f" {number}" if len(optimizers) > 1 else "")
        for number, optimizer in enumerate(optimizers)
    ]
    held = [
        ReplicaTensor(f"{word} of group {index} of {titles[number]}", None, optimizer, (index, word), number)
        for number, optimizer in enumerate(optimizers)
        for index, group in enumerate(optimizer.param_groups)
        for word in sorted(group)
        if word != "params" and is_comparable(group[word])
    ]
    held += [ReplicaTensor(f'parameter "{entry.name}"', entry.name, entry.param, (), -1) for entry in entries]
    for number, optimizer in enumerate(optimizers):
        of = f" in {titles[number]}" if len(optimizers) > 1 else ""
        held += _optimizer_tensors(entries, optimizer, number, of)
    return held


def _optimizer_tensors(entries: Sequence[GradEntry], optimizer: Optimizer, number: int, of: str) -> list[ReplicaTensor]:
    return [
        ReplicaTensor(f'{word} of parameter "{entry.name}"{of}', entry.name, optimizer, (entry.param, word), number)
        for entry in entries
        for word, value in sorted(_state_of(optimizer, entry.param).items(), key=lambda item: str(item[0]))
        # A fraction may be of this rank's own loss, as LBFGS keeps it; a count is not.
        if is_comparable(value) and not isinstance(value, float)
    ]


def _state_of(optimizer: Optimizer, param: torch.Tensor) -> dict[Any, Any]:
    """The optimizer's state, without making one: an optimizer's `state` is a defaultdict."""
    state: dict[Any, Any] = optimizer.state.get(param, {})
    return state


def is_comparable(value: object) -> bool:
    """Return whether equal replicas hold it alike: dense tensors and plain values do."""
    if isinstance(value, torch.Tensor):
        return value.layout == torch.strided and not value.is_quantized
    if isinstance(value, list | tuple):
        return all(not isinstance(item, torch.Tensor) and is_comparable(item) for item in value)
    return isinstance(value, bool | int | float | str)


def cut(replica_tensors: Sequence[ReplicaTensor], num_shares: int) -> list[list[Piece]]:
    """Divide a replica into so many shares of about equal bytes, on borders of words."""
    sizes = [_size(replica_tensor.value) for replica_tensor in replica_tensors]
    total = sum(numel * item for numel, item in sizes)
    shares: list[list[Piece]] = [[] for _ in range(num_shares)]
    at = 0
    for replica_tensor, (numel, item) in zip(replica_tensors, sizes, strict=True):
        step = max(1, digest.WORD_NBYTES // item)
        start = 0
        while start < numel:
            share = min(num_shares - 1, at * num_shares // max(1, total))
            room = (share + 1) * total // num_shares - at  # bytes until the share is full
            stop = numel if share == num_shares - 1 else min(numel, start + max(step, room // item // step * step))
            shares[share].append(Piece(replica_tensor, start, stop))
            at += (stop - start) * item
            start = stop
    return shares


def _size(value: Any) -> tuple[int, int]:
    """Elements, and bytes of each."""
    return (value.numel(), value.element_size()) if isinstance(value, torch.Tensor) else (1, _VALUE_NBYTES)


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
    silent: bool = False  # the replica was not at rest: nobody may compare it
    joined: int = 0  # of all, where the host knows them

    def is_there(self) -> bool:
        """Tell whether the device is through with it."""
        if self.events and all(has_happened(event.cuda_event) for event in self.events):
            self.events.clear()
        return not self.events

    def word(self) -> bytes:
        """8 bytes of a digest that is there, never those that stand for something else."""
        if self.pending is not None:
            pending = [number & (1 << 64) - 1 for number in self.pending[:-1].tolist()]
            self.joined = digest.joined([self.layout, *self.known, *pending])
            self.loss_scale = float(self.pending[-1:].view(torch.float64))
            self.pending = None
        return (self.joined + _NUM_RESERVED if self.joined < _NUM_RESERVED else self.joined).to_bytes(8, "little")


class ReplicaDigests:
    """This rank's digests; it lives while the plan changes."""

    def __init__(
        self, entries: Sequence[GradEntry], optimizers: Sequence[Optimizer], scaler: GradScaler | None
    ) -> None:
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

    def take(self, step: int, silent: bool = False) -> None:
        """Digest this step's share; on a GPU only ask for it. `silent`: it is not to be compared."""
        state = [(id(optimizer.state), len(optimizer.state)) for optimizer in self.optimizers]
        if not self._shares or state != self._seen or step % NUM_SHARES == 0:
            self._list(state)
        reading = self._read(step, self._shares[step % NUM_SHARES])
        reading.silent = silent
        self._readings.append(reading)
        if len(self._readings) > _MOST_WAITING:
            self._readings.popleft()

    def announce(self) -> tuple[bytes, float]:
        """Return what the next header says: the digest whose turn it is, and the loss scale."""
        reading = self._readings.popleft() if len(self._readings) >= self._lag else None
        self._announced.append(reading)
        if reading is None or reading.silent:
            return NO_REPLICA_DIGEST, self._scale_on_host()
        if reading.events and not reading.is_there():
            return DIGEST_COMES_LATER, self._scale_on_host()
        word = reading.word()
        return word, self._scale_on_host() or reading.loss_scale

    def hear(self, headers: Headers) -> DigestMismatch | None:
        """Compare what all ranks announced in one header, the oldest that was not heard."""
        reading = self._announced.popleft()
        if reading is None:
            return None
        if headers.notes & Note.LATER and reading.generation == self.generation:
            self._readings.appendleft(reading)
        if not headers.replicas_differ:
            return None
        words = [head.replica_digest for head in headers.heads]
        return DigestMismatch(reading.step, reading.generation, words, reading.layout, reading.pieces)

    def forget(self) -> None:
        """Forget what was digested so far, as it says no more: replicas were changed, or may differ for a while."""
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
        scale = self._scale_on_device()
        distant: dict[torch.device, list[torch.Tensor]] = {}
        for taken in [piece.take() for piece in pieces]:
            if isinstance(taken, int):
                known.append(taken)
            elif taken.is_cuda:
                distant.setdefault(taken.device, []).append(taken)
            else:
                known.append(digest.digest(taken))
        reading = DigestReading(step, self.generation, self._layout, pieces, known, None, [], 0.0)
        if not distant and scale is None:
            reading.joined = digest.joined([self._layout, *known])
        else:
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
        event.record(current_stream(device))
        reading.events.append(event)


def _together(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Put small parts into one tensor of bytes: a kernel for each would cost more than it does."""
    small = [part for part in parts if part.numel() * part.element_size() < _SMALL_NBYTES]
    large = [part for part in parts if part.numel() * part.element_size() >= _SMALL_NBYTES]
    if len(small) < 2:
        return large + small
    return [*large, torch.cat([part.contiguous().view(torch.uint8) for part in small])]
