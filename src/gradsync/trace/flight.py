"""The flight record: a rank's last moments, in a file that the kernel keeps when the process is killed.

    │ magic │ slot 0 │ slot 1 │ … │ slot 63 │        each: number, time, step, moment, bucket, number

Written by a store to mapped memory, half a microsecond each, from front to back. A slot that was being written when the
rank died does not end with the number it begins with, and is left out.
"""

from __future__ import annotations

import enum
import math
import mmap
import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

from gradsync import files

_MAGIC = b"gradsync flight1"
_NUM_SLOTS = 64
_SLOT = struct.Struct("<QdqiiQ")  # number, time, step, moment, bucket, number; numbers begin with 1
_FIRST, _SIZE = len(_MAGIC), _SLOT.size
_pack_into, _now = _SLOT.pack_into, time.perf_counter
NBYTES = 4096


class Moment(enum.IntEnum):
    """The last thing that a rank did; the value is in the file."""

    ATTACHED = 0
    FORWARD = 1
    BACKWARD = 2
    BUCKET_LEFT = 3
    COMPUTED = 4  # everything of its own is done: what follows is waiting
    WAITING = 5
    BUCKET_CAME = 6
    AVERAGED = 7
    OPTIMIZER = 8
    STEPPED = 9
    INPUT = 10
    FAILED = 11
    LEFT = 12


class FlightEntry(NamedTuple):
    """One moment."""

    number: int
    at: float  # monotonic
    step: int
    moment: Moment
    bucket: int | None


class Flight:
    """A rank's own record, open for writing."""

    def __init__(self, path: Path) -> None:
        fd = files.open_to_write(path, os.O_RDWR, 0o600)
        try:
            os.ftruncate(fd, 0)
            # Not a hole: on a full disk the first store to one would be a SIGBUS, not an error.
            os.posix_fallocate(fd, 0, NBYTES)
            self._memory = mmap.mmap(fd, NBYTES)
        finally:
            os.close(fd)
        self._memory[: len(_MAGIC)] = _MAGIC
        self._number = 0

    def note(self, step: int, moment: Moment, bucket: int = -1) -> None:
        """Write a moment down, over the oldest."""
        number = self._number = self._number + 1
        _pack_into(self._memory, _FIRST + number % _NUM_SLOTS * _SIZE, number, _now(), step, moment, bucket, number)

    def close(self) -> None:
        self._memory.close()


def read_flight(path: Path) -> list[FlightEntry]:
    """Return what a record holds, oldest first; nothing if it is none."""
    try:
        content = files.beginning(path, NBYTES)
    except OSError:
        return []
    if len(content) < NBYTES or not content.startswith(_MAGIC):
        return []
    slots = (_decode(content, slot) for slot in range(_NUM_SLOTS))
    return sorted(entry for entry in slots if entry is not None)


def _decode(content: bytes, slot: int) -> FlightEntry | None:
    number, at, step, moment, bucket, again = _SLOT.unpack_from(content, _FIRST + slot * _SIZE)
    if not number or number != again or number % _NUM_SLOTS != slot or not math.isfinite(at):
        return None
    if moment not in Moment._value2member_map_:
        return None
    return FlightEntry(number, at, step, Moment(moment), bucket if bucket >= 0 else None)
