"""What ranks write to each other: a request of one size, and after some kinds a freight of bytes.

    worker                                  owner of a shard
      │ PUSH clock, version read, ▒gradients▒  │
      ├───────────────────────────────────────▶│ makes an update, at once or when the clock is complete
      │ PULL clock                             │
      ├───────────────────────────────────────▶│ waits until the worker may read
      │ PARAMETERS version, slowest, ▒freight▒ │
      │◀───────────────────────────────────────┤
      │ LEAVE, DRAIN, ALIVE, BYE: no freight   │

Every request counts what its sender has heard from its receiver so far: then the receiver may let go of what it
sent. Nothing is unpickled: a request is a struct, a freight is the tensors' own bytes.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import torch

_STRUCT = struct.Struct("<qqqqqq")
LETTER_NBYTES = _STRUCT.size
REQUEST_TAG = 0  # no freight has it: kinds with one are not 0
_KIND_BITS, _SHARD_BITS, _VERSION_BITS = 3, 12, 16  # 31 in all: a tag is a non-negative C int


class Kind(enum.IntEnum):
    """What a letter is about."""

    ALIVE = 0  # nothing new
    PUSH = 1  # a worker's gradients for one shard
    PARAMETERS = 2  # the answer to PULL and DRAIN
    PULL = 3
    DRAIN = 4  # as PULL, but answered when all have sent it; version 1: this worker goes on afterwards
    LEAVE = 5  # this worker pushes no more
    BYE = 6  # nothing follows


class Letter(NamedTuple):
    """One request."""

    kind: Kind
    clock: int = 0  # the worker's
    version: int = 0  # the shard's: as the worker last read it, or as it is answered
    slowest: int = 0  # in an answer: the lowest clock of all who still push
    nbytes: int = 0  # of the freight
    heard: int = 0  # how many requests the sender has had from the receiver


def write(letter: Letter) -> torch.Tensor:
    """The letter as bytes.

    >>> read(write(Letter(Kind.PULL, clock=3, heard=7)))
    Letter(kind=<Kind.PULL: 3>, clock=3, version=0, slowest=0, nbytes=0, heard=7)
    """
    return torch.frombuffer(bytearray(_STRUCT.pack(*letter)), dtype=torch.uint8)


def read(message: torch.Tensor) -> Letter:
    kind, *rest = _STRUCT.unpack(message.numpy().tobytes())
    return Letter(Kind(kind), *rest)


def freight_tag(kind: Kind, shard: int, version: int) -> int:
    """Marks a freight, so that one of another kind, shard or version never matches it; each modulo its bits.

    >>> hex(freight_tag(Kind.PUSH, shard=2, version=3))
    '0x10020003'
    """
    return (kind << _SHARD_BITS | shard % (1 << _SHARD_BITS)) << _VERSION_BITS | version % (1 << _VERSION_BITS)
