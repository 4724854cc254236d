"""One page of memory per rank that its peers on the same host can read: what the rank is doing.

The page is a memfd that peers open through /proc/<pid>/fd and check by a nonce: it has no name, so nothing
is left behind, and it stays readable after its owner was killed.
"""

from __future__ import annotations

import enum
import mmap
import os
import secrets
import struct
from typing import NamedTuple

_NBYTES = 4096
_HEAD = struct.Struct("<16s")  # nonce
_STATE = struct.Struct("<Qqiii")  # beat, step, phase, bucket, number of culprits
_MAX_CULPRITS = 64


class Phase(enum.IntEnum):
    """Where in a step a rank is."""

    COMPUTING = 0
    BACKWARD = 1
    SYNCHRONIZING = 2
    FAILED = 3
    LEFT = 4

    def __str__(self) -> str:
        return self.name.lower()


class State(NamedTuple):
    """What a rank says of itself."""

    beat: int
    step: int
    phase: Phase
    bucket: int
    culprits: tuple[int, ...]  # whom a failed rank holds responsible


class Page:
    """A page, own or a peer's. Only the owner writes."""

    def __init__(self, fd: int, nonce: bytes, writable: bool) -> None:
        self.fd = fd
        self.nonce = nonce
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._memory = mmap.mmap(fd, _NBYTES, access=access)

    @classmethod
    def create(cls) -> Page:
        fd = os.memfd_create("gradsync-page", os.MFD_CLOEXEC)
        os.ftruncate(fd, _NBYTES)
        page = cls(fd, secrets.token_bytes(16), writable=True)
        _HEAD.pack_into(page._memory, 0, page.nonce)
        return page

    @classmethod
    def open(cls, pid: int, fd: int, nonce: bytes) -> Page | None:
        """A peer's page, or None where this process cannot see it (another host or container)."""
        try:
            mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            if os.fstat(mine).st_size != _NBYTES:
                raise ValueError("not a page")
            page = cls(mine, nonce, writable=False)
        except (OSError, ValueError):
            os.close(mine)
            return None
        if _HEAD.unpack_from(page._memory)[0] != nonce:
            page.close()
            return None
        return page

    def write(self, state: State) -> None:
        culprits = state.culprits[:_MAX_CULPRITS]
        _STATE.pack_into(self._memory, _HEAD.size, state.beat, state.step, state.phase, state.bucket, len(culprits))
        struct.pack_into(f"<{len(culprits)}i", self._memory, _HEAD.size + _STATE.size, *culprits)

    def read(self) -> State:
        beat, step, phase, bucket, count = _STATE.unpack_from(self._memory, _HEAD.size)
        culprits = struct.unpack_from(f"<{min(count, _MAX_CULPRITS)}i", self._memory, _HEAD.size + _STATE.size)
        return State(beat, step, Phase(phase), bucket, culprits)

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)
