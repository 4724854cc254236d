"""One page of memory per rank that its peers on the same host can read: what the rank is doing.

The page is a memfd that peers open through /proc/<pid>/fd and check by a nonce: it has no name, so nothing
is left behind, and it stays readable after its owner was killed.

    │ nonce │ slot 0: checksum, number, state │ slot 1: checksum, number, state │ board: the same, twice, with a text │

A writer fills the two slots in turn. A reader takes the newer one whose checksum is right, so it never sees
half a write, not even of a rank that was killed while it wrote. On the board the first rank of a host leaves what it
hears of other hosts.
"""

from __future__ import annotations

import enum
import mmap
import os
import secrets
import struct
import threading
import zlib
from typing import NamedTuple

_NBYTES = 8192
_NONCE_NBYTES = 16
_MAX_CULPRITS = 64
_CHECKSUM = struct.Struct("<I")
_BODY = struct.Struct(f"<QQqiii{4 * _MAX_CULPRITS}s")  # number, beat, step, phase, bucket, number of culprits, culprits
RECORD_NBYTES = _CHECKSUM.size + _BODY.size
_SLOTS = (_NONCE_NBYTES, _NONCE_NBYTES + RECORD_NBYTES)
_NOTE = struct.Struct("<QI")  # number, length
MAX_NOTE_NBYTES = 2048
_NOTE_NBYTES = _CHECKSUM.size + _NOTE.size + MAX_NOTE_NBYTES
_NOTES = (4096 - _NOTE_NBYTES, 4096)


class Phase(enum.IntEnum):
    """The part of a step in which a rank is."""

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
    """The state that a rank says it is in."""

    beat: int
    step: int
    phase: Phase
    bucket: int
    culprits: tuple[int, ...]  # whom a rank that gave up holds responsible


INITIAL = RankState(0, 0, Phase.COMPUTING, -1, ())


class Heartbeat:
    """A page, own or a peer's."""

    def __init__(self, fd: int, nonce: bytes, writable: bool) -> None:
        self.fd = fd
        self.nonce = nonce
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._memory = mmap.mmap(fd, _NBYTES, access=access)
        self._last = INITIAL
        self._last_note = (0, b"")

    @classmethod
    def open(cls, pid: int, fd: int, nonce: bytes) -> Heartbeat | None:
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

    def read(self) -> RankState:
        """The newest whole state; if both slots are being written just now, the one read before."""
        slots = (decode(self._memory[at : at + RECORD_NBYTES]) for at in _SLOTS)
        whole = [slot for slot in slots if slot is not None]
        if whole:
            self._last = max(whole)[1]
        return self._last

    def read_note(self) -> tuple[int, bytes]:
        """Number and text of the newest note on the board; 0 if there is none."""
        numbers = [_NOTE.unpack_from(self._memory, at + _CHECKSUM.size)[0] for at in _NOTES]
        if max(numbers) != self._last_note[0]:  # nearly always it is the one read before
            notes = (_decode_note(self._memory[at : at + _NOTE_NBYTES]) for at in _NOTES)
            self._last_note = max([note for note in notes if note is not None], default=self._last_note)
        return self._last_note

    def close(self) -> None:
        self._memory.close()
        os.close(self.fd)


class OwnHeartbeat(Heartbeat):
    """This rank's page, in which it says where it is. Cheap: one write to memory."""

    def __init__(self) -> None:
        fd = os.memfd_create("gradsync-page", os.MFD_CLOEXEC)
        os.ftruncate(fd, _NBYTES)
        super().__init__(fd, secrets.token_bytes(_NONCE_NBYTES), writable=True)
        self._memory[:_NONCE_NBYTES] = self.nonce
        self._number = 0
        self._note_number = 0
        self._lock = threading.Lock()  # the thread that beats writes too
        self.state = INITIAL  # what was said last
        self.at(0, Phase.COMPUTING)

    def at(self, step: int, phase: Phase, bucket: int = -1, culprits: tuple[int, ...] = ()) -> None:
        """Say where this rank is; several times a step."""
        with self._lock:
            self.write(RankState(self.state.beat, step, phase, bucket, culprits))

    def beat(self) -> None:
        """Say that this rank is alive."""
        with self._lock:
            self.write(self.state._replace(beat=self.state.beat + 1))

    def leave_note(self, text: bytes) -> None:
        """Let this be on the board."""
        assert len(text) <= MAX_NOTE_NBYTES, "a note is short"
        with self._lock:
            if self._memory.closed:
                return
            self._note_number += 1
            body = _NOTE.pack(self._note_number, len(text)) + text
            record = _CHECKSUM.pack(zlib.crc32(body)) + body
            at = _NOTES[self._note_number % 2]
            self._memory[at : at + len(record)] = record

    def close(self) -> None:
        with self._lock:
            super().close()

    def write(self, state: RankState) -> None:
        """Let this be what peers read; the caller holds the lock."""
        self.state = state
        if not self._memory.closed:
            self._number += 1
            at = _SLOTS[self._number % 2]
            self._memory[at : at + RECORD_NBYTES] = encode(state, self._number)


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


def _decode_note(record: bytes) -> tuple[int, bytes] | None:
    number, length = _NOTE.unpack_from(record, _CHECKSUM.size)
    body = record[_CHECKSUM.size : _CHECKSUM.size + _NOTE.size + length]
    if length > MAX_NOTE_NBYTES or _CHECKSUM.unpack_from(record)[0] != zlib.crc32(body):
        return None
    return number, body[_NOTE.size :]
