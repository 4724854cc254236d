"""One page of memory per rank that its peers on the same host can read: what the rank is doing.

The page is a memfd that peers open through /proc/<pid>/fd and check by a nonce: it has no name, so nothing
is left behind, and it stays readable after its owner was killed.

    │ nonce │ slot 0: checksum, number, state │ slot 1: checksum, number, state │

A writer fills the two slots in turn. A reader takes the newer one whose checksum is right, so it never sees
half a write, not even of a rank that was killed while it wrote.
"""

from __future__ import annotations

import enum
import mmap
import os
import secrets
import struct
import zlib
from typing import NamedTuple

_NBYTES = 4096
_NONCE_NBYTES = 16
_MAX_CULPRITS = 64
_CHECKSUM = struct.Struct("<I")
_BODY = struct.Struct(f"<QQqiii{4 * _MAX_CULPRITS}s")  # number, beat, step, phase, bucket, number of culprits, culprits
RECORD_NBYTES = _CHECKSUM.size + _BODY.size


class Phase(enum.IntEnum):
    """Where in a step a rank is."""

    COMPUTING = 0
    BACKWARD = 1
    SYNCHRONIZING = 2
    WAITING = 3  # it has launched all it can, and waits for the others
    FAILED = 4  # it gave up: by itself, or because its culprits were late
    LOST_PEER = 5  # it gave up because its culprits died or fell silent
    LEFT = 6

    def __str__(self) -> str:
        return self.name.lower()


class RankState(NamedTuple):
    """What a rank says of itself."""

    beat: int
    step: int
    phase: Phase
    bucket: int
    culprits: tuple[int, ...]  # whom a rank that gave up holds responsible


INITIAL = RankState(0, 0, Phase.COMPUTING, -1, ())


class Page:
    """A page, own or a peer's. Only the owner writes."""

    def __init__(self, fd: int, nonce: bytes, writable: bool) -> None:
        self.fd = fd
        self.nonce = nonce
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._memory = mmap.mmap(fd, _NBYTES, access=access)
        self._number = 0
        self._last = INITIAL

    @classmethod
    def create(cls) -> Page:
        fd = os.memfd_create("gradsync-page", os.MFD_CLOEXEC)
        os.ftruncate(fd, _NBYTES)
        page = cls(fd, secrets.token_bytes(_NONCE_NBYTES), writable=True)
        page._memory[:_NONCE_NBYTES] = page.nonce
        page.write(INITIAL)
        return page

    @classmethod
    def open(cls, pid: int, fd: int, nonce: bytes) -> Page | None:
        """A peer's page, or None where this process cannot see it (another host or container)."""
        try:
            mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            if os.fstat(mine).st_size != _NBYTES:
                raise ValueError("not a page")
            page = cls(mine, nonce, writable=False)
        except (OSError, ValueError):
            os.close(mine)
            return None
        if page._memory[:_NONCE_NBYTES] != nonce:
            page.close()
            return None
        return page

    def write(self, state: RankState) -> None:
        self._number += 1
        at = _slot(self._number)
        self._memory[at : at + RECORD_NBYTES] = encode(state, self._number)

    def read(self) -> RankState:
        """The newest whole state; if both slots are being written just now, the one read before."""
        slots = (decode(self._memory[at : at + RECORD_NBYTES]) for at in (_slot(0), _slot(1)))
        whole = [slot for slot in slots if slot is not None]
        if whole:
            self._last = max(whole)[1]
        return self._last

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)


def encode(state: RankState, number: int = 0) -> bytes:
    """The state as a record of fixed length that proves its own integrity."""
    culprits = state.culprits[:_MAX_CULPRITS]
    # Written several times a step, nearly always without culprits: then nothing is packed for them.
    names = struct.pack(f"<{len(culprits)}i", *culprits) if culprits else b""
    body = _BODY.pack(number, state.beat, state.step, state.phase, state.bucket, len(culprits), names)
    return _CHECKSUM.pack(zlib.crc32(body)) + body


def decode(record: bytes) -> tuple[int, RankState] | None:
    """Number and state, or None for anything that `encode` did not make.

    >>> decode(encode(INITIAL, 7))[0], decode(b"null")
    (7, None)
    """
    if len(record) != RECORD_NBYTES or _CHECKSUM.unpack_from(record)[0] != zlib.crc32(record[_CHECKSUM.size :]):
        return None
    number, beat, step, phase, bucket, count, names = _BODY.unpack_from(record, _CHECKSUM.size)
    if phase not in Phase._value2member_map_ or not 0 <= count <= _MAX_CULPRITS:
        return None
    return number, RankState(beat, step, Phase(phase), bucket, struct.unpack_from(f"<{count}i", names))


def _slot(number: int) -> int:
    return _NONCE_NBYTES + number % 2 * RECORD_NBYTES
