"""The messages that ranks write to each other: a request of one size, and after some kinds a payload of bytes.

    worker                                  owner of a shard
      │ PUSH clock, version read, ▒gradients▒  │
      ├───────────────────────────────────────▶│ makes an update, at once or when the clock is complete
      │ PULL clock                             │
      ├───────────────────────────────────────▶│ waits until the worker may read
      │ PARAMETERS version, slowest, ▒payload▒ │
      │◀───────────────────────────────────────┤
      │ LEAVE, DRAIN, ALIVE, BYE: no payload   │

Every request counts what its sender has heard from its receiver so far: then the receiver may let go of what it
sent. Nothing is unpickled: a request is a struct, a payload is the tensors' own bytes.

Tensors as one run of bytes on the host, and back.

    │ 1 0 1 │ tensor 0 ···· │ tensor 2 ·· │     first which of them are there, a byte each
    └ 16 ┘ every part begins at a multiple of 16 bytes, so that it can be seen as its own type

A parameter without a gradient travels as the 0 alone.
"""

from __future__ import annotations

import enum
import struct
import threading
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

import torch

from gradsync.compress.blocks import align
from gradsync.exchange.flat import cut_bytes, sum_nbytes

_STRUCT = struct.Struct("<qqqqqq")
MESSAGE_NBYTES = _STRUCT.size
REQUEST_TAG = 0  # no payload has it: kinds with one are not 0
_KIND_BITS, _SHARD_BITS, _VERSION_BITS = 3, 12, 16  # 31 in all: a tag is a non-negative C int


class MessageKind(enum.IntEnum):
    """The kind of a message: what it is about."""

    ALIVE = 0  # nothing new
    PUSH = 1  # a worker's gradients for one shard
    PARAMETERS = 2  # the answer to PULL and DRAIN
    PULL = 3
    DRAIN = 4  # as PULL, but answered when all have sent it; version 1: this worker goes on afterwards
    LEAVE = 5  # this worker pushes no more
    BYE = 6  # nothing follows


class ShardMessage(NamedTuple):
    """One request."""

    kind: MessageKind
    clock: int = 0  # the worker's
    version: int = 0  # the shard's: as the worker last read it, or as it is answered
    slowest: int = 0  # in an answer: the lowest clock of all who still push
    nbytes: int = 0  # of the payload
    heard: int = 0  # how many requests the sender has had from the receiver


def write(message: ShardMessage) -> torch.Tensor:
    """The message as bytes.

    >>> read(write(ShardMessage(MessageKind.PULL, clock=3, heard=7)))
    ShardMessage(kind=<MessageKind.PULL: 3>, clock=3, version=0, slowest=0, nbytes=0, heard=7)
    """
    return torch.frombuffer(bytearray(_STRUCT.pack(*message)), dtype=torch.uint8)


def read(message: torch.Tensor) -> ShardMessage:
    kind, *rest = _STRUCT.unpack(message.numpy().tobytes())
    return ShardMessage(MessageKind(kind), *rest)


def payload_tag(kind: MessageKind, shard: int, version: int) -> int:
    """Marks a payload, so that one of another kind, shard or version never matches it; each modulo its bits.

    >>> hex(payload_tag(MessageKind.PUSH, shard=2, version=3))
    '0x10020003'
    """
    return (kind << _SHARD_BITS | shard % (1 << _SHARD_BITS)) << _VERSION_BITS | version % (1 << _VERSION_BITS)


def pack(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """A new tensor of bytes that holds all of them.

    >>> w = torch.tensor([1.0, 2.0])
    >>> unpack(pack([w, None]), [w, w])
    [tensor([1., 2.]), None]
    """
    present = [tensor.detach() for tensor in tensors if tensor is not None]
    begins = align(len(tensors))
    payload = torch.empty(begins + sum_nbytes(present), dtype=torch.uint8, device="cpu")
    payload[:begins] = 0
    payload[: len(tensors)] = torch.tensor([tensor is not None for tensor in tensors], device="cpu")
    for view, tensor in zip(cut_bytes(payload[begins:], present), present, strict=True):
        view.copy_(tensor)
    return payload


def unpack(payload: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return what `pack` was given, as views of the payload; `like` tells the types and shapes."""
    there = payload[: len(like)].tolist()
    views = iter(cut_bytes(payload[align(len(like)) :], list(compress(like, there))))
    return [next(views) if here else None for here in there]


class OwnerAnswer(NamedTuple):
    """The answer of an owner to PULL and DRAIN."""

    version: int
    slowest: int  # the lowest clock of all who still push
    payload: torch.Tensor


class Inbox:
    """The answers of all owners to one question.

    The training thread asks and waits here; the owners' answers are put in, on any thread.
    """

    def __init__(self, num_owners: int) -> None:
        self._size = num_owners
        self._answers: dict[int, OwnerAnswer] = {}
        self._arrived = threading.Condition()

    def empty(self) -> None:
        """Forget the answers to the question before."""
        with self._arrived:
            self._answers.clear()

    def put(self, owner: int, answer: OwnerAnswer) -> None:
        with self._arrived:
            self._answers[owner] = answer
            self._arrived.notify_all()

    def full(self, slice_s: float) -> bool:
        """Return whether every owner has answered; wait for at most a slice."""
        with self._arrived:
            return self._arrived.wait_for(lambda: len(self._answers) == self._size, slice_s)

    def missing(self) -> list[int]:
        """The owners that have not answered."""
        with self._arrived:
            return [owner for owner in range(self._size) if owner not in self._answers]

    def answers(self) -> list[OwnerAnswer]:
        """All answers, by owner."""
        with self._arrived:
            return [self._answers[owner] for owner in range(self._size)]
