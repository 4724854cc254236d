"""What a replica holds and all ranks must hold alike: parameters, optimizer state, hyper-parameters; cut into shares.

    replica tensors   │ lr of group 0 │ … │ w ─────────────── │ b │ exp_avg of w ──── │ …
    shares     │ 0    │ 1    │ 2    │ 3    │ 4    │ 5    │ …                       equal bytes, one per step

What it holds is looked up when it is needed: an optimizer makes its state late, and loading a checkpoint replaces it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from gradsync.engine.bucket import Entry
from gradsync.kernels.digest import WORD_NBYTES, digest

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
        return digest(value) if isinstance(value, torch.Tensor) else zlib.crc32(repr(value).encode())


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
        return taken if isinstance(taken, int) else digest(taken)


def replica_tensors_of(entries: Sequence[Entry], optimizers: Sequence[Optimizer]) -> list[ReplicaTensor]:
    """What a replica holds, in an order that is equal on every rank; what may be the cause of the rest comes first."""
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


def _optimizer_tensors(entries: Sequence[Entry], optimizer: Optimizer, number: int, of: str) -> list[ReplicaTensor]:
    return [
        ReplicaTensor(f'{word} of parameter "{entry.name}"{of}', entry.name, optimizer, (entry.param, word), number)
        for entry in entries
        for word, value in sorted(_state_of(optimizer, entry.param).items(), key=lambda item: str(item[0]))
        # A fraction may be of this rank's own loss, as LBFGS keeps it; a count is not.
        if is_comparable(value) and not isinstance(value, float)
    ]


def _state_of(optimizer: Optimizer, param: torch.Tensor) -> dict[Any, Any]:
    """Without making one: an optimizer's `state` is a defaultdict."""
    state: dict[Any, Any] = optimizer.state.get(param, {})
    return state


def is_comparable(value: object) -> bool:
    """Whether equal replicas hold it alike: dense tensors and plain values do."""
    if isinstance(value, torch.Tensor):
        return value.layout == torch.strided and not value.is_quantized
    if isinstance(value, list | tuple):
        return all(not isinstance(item, torch.Tensor) and is_comparable(item) for item in value)
    return isinstance(value, bool | int | float | str)


def cut(replica_tensors: Sequence[ReplicaTensor], num_shares: int) -> list[list[Piece]]:
    """Everything in so many shares of about equal bytes, cut on borders of words."""
    sizes = [_size(replica_tensor.value) for replica_tensor in replica_tensors]
    total = sum(numel * item for numel, item in sizes)
    shares: list[list[Piece]] = [[] for _ in range(num_shares)]
    at = 0
    for replica_tensor, (numel, item) in zip(replica_tensors, sizes, strict=True):
        step = max(1, WORD_NBYTES // item)
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
