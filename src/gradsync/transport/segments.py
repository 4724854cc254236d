"""Memory that the ranks of one host share: each brings an equal piece, and maps everybody's.

A piece is a memfd that the others open through /proc/<pid>/fd and check by a nonce: it has no name, so nothing
is left behind, and no /dev/shm limit applies. Its pages are reserved before anybody maps it: touching a page that
is not there would be a SIGBUS, which ends the process without a word.

    rank 0's memory   │ piece of 0 │ piece of 1 │ piece of 2 │      bases[r] is where rank r's piece
    rank 1's memory     │ piece of 0 │ piece of 1 │ piece of 2 │    lies in this process
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import struct
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from gradsync.errors import NotEnoughMemory
from gradsync.transport import cgroups

_NONCE_NBYTES = 16
_RECORD = struct.Struct("<?qq16s")  # reserved, pid, fd, nonce
_PAGE_NBYTES = mmap.PAGESIZE
_MARGIN_NBYTES = 64 << 20  # left to everybody else

Exchange = Callable[[bytes], list[bytes]]


class Segment:
    """The places in this process of the peers' pieces; it lives as long as any tensor in this rank's own piece."""

    def __init__(self, views: list[torch.Tensor], local_rank: int, number: int) -> None:
        self.local_rank = local_rank
        self.number = number  # of all that the team has taken, the same on every rank
        self.nbytes = views[local_rank].numel()
        self._addresses = [view.data_ptr() for view in views]
        # Not our own: its mapping holds this object, see `_Mapping`.
        self._peers = views[:local_rank] + views[local_rank + 1 :]
        self._bases: dict[int, ctypes.Array[ctypes.c_void_p]] = {}

    @property
    def begin(self) -> int:
        return self._addresses[self.local_rank]

    def bases(self, offset: int) -> ctypes.Array[ctypes.c_void_p]:
        """The addresses of the part at `offset` in every rank's piece, in rank order."""
        found = self._bases.get(offset)
        if found is None:
            found = (ctypes.c_void_p * len(self._addresses))(*(address + offset for address in self._addresses))
            self._bases[offset] = found
        return found


class _Mapping:
    """A mapped piece. A tensor in it keeps it alive, and it keeps the mappings of the peers' pieces alive.

    Not Python's own mmap: that keeps a file descriptor open for each.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        buffer = (ctypes.c_ubyte * nbytes).from_address(address)
        weakref.finalize(buffer, _libc.munmap, address, nbytes).atexit = False
        self._buffer = buffer

    def view(self) -> torch.Tensor:
        """The piece's bytes. The tensor holds the buffer, and nothing else does for long."""
        return torch.frombuffer(self._buffer, dtype=torch.uint8)

    def hold(self, segment: Segment) -> None:
        """Keep `segment` as long as any tensor of this piece lives."""
        self._buffer.segment = segment  # type: ignore[attr-defined]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def allocate(
    exchange: Exchange, members: Sequence[int], index: int, nbytes: int, number: int = 0
) -> tuple[torch.Tensor, Segment]:
    """Return this rank's piece as bytes, and the segment; every rank of the group calls this.

    `members` are the ranks of this host, as indices in the group, and `index` is this rank. `number` is what
    all call this segment.

    `exchange` brings every rank's bytes to every rank. If memory lacks for any rank of the group, on whatever
    host, all raise `NotEnoughMemory`: what a group does must be the same everywhere.
    """
    nbytes = max(_PAGE_NBYTES, -(-nbytes // _PAGE_NBYTES) * _PAGE_NBYTES)
    nonce = secrets.token_bytes(_NONCE_NBYTES)
    shortage, fd = _reserve(nbytes, len(members), nonce)
    try:
        records = [_RECORD.unpack(record) for record in exchange(_RECORD.pack(not shortage, os.getpid(), fd, nonce))]
        mappings = None
        if all(reserved for reserved, *_ in records):
            mappings = _map_all([records[member] for member in members], nbytes)
        # Also keeps every piece open until everybody has looked.
        mapped = [bool(flag[0]) for flag in exchange(bytes([mappings is not None]))]
    finally:
        if fd >= 0:
            os.close(fd)
    if mappings is None or not all(mapped):
        raise NotEnoughMemory(shortage or _elsewhere(records, mapped, nbytes))
    views = [mapping.view() for mapping in mappings]
    local_rank = members.index(index)
    segment = Segment(views, local_rank, number)
    mappings[local_rank].hold(segment)
    return views[local_rank], segment


def _reserve(nbytes: int, num_ranks: int, nonce: bytes) -> tuple[str, int]:
    """A piece with all its pages, as a file descriptor; or what was lacking, and -1."""
    needed = f"{_megabytes(nbytes)} of shared memory for each of the {num_ranks} ranks of this host"
    available = available_nbytes()
    if available is not None and nbytes * num_ranks + _MARGIN_NBYTES > available:
        return f"gradsync needs {needed}, but {_megabytes(available)} are free in all", -1
    try:
        fd = os.memfd_create("gradsync-segment", os.MFD_CLOEXEC)
    except OSError as error:
        return f"gradsync needs {needed}, but the kernel gives none ({error.strerror})", -1
    try:
        os.posix_fallocate(fd, 0, nbytes + _PAGE_NBYTES)  # the last page holds the nonce
        os.pwrite(fd, nonce, nbytes)
    except (OSError, OverflowError) as error:
        os.close(fd)
        return f"gradsync needs {needed}, but it cannot be reserved ({getattr(error, 'strerror', error)})", -1
    return "", fd


def _map_all(records: list[tuple[bool, int, int, bytes]], nbytes: int) -> list[_Mapping] | None:
    mappings = []
    for _, pid, fd, nonce in records:
        mapping = _map(pid, fd, nonce, nbytes)
        if mapping is None:
            return None
        mappings.append(mapping)
    return mappings


def _map(pid: int, fd: int, nonce: bytes, nbytes: int) -> _Mapping | None:
    try:
        mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if os.fstat(mine).st_size != nbytes + _PAGE_NBYTES or os.pread(mine, _NONCE_NBYTES, nbytes) != nonce:
            return None
        return _Mapping(mine, nbytes)
    except (OSError, ValueError):
        return None
    finally:
        os.close(mine)


def _elsewhere(records: list[tuple[bool, int, int, bytes]], mapped: list[bool], nbytes: int) -> str:
    lacking = [rank for rank, record in enumerate(records) if not record[0]]
    if lacking:
        return (
            f"gradsync needs {_megabytes(nbytes)} of shared memory on every rank, but rank {lacking[0]} has not got it"
        )
    return f"rank {mapped.index(False)} could not map {_megabytes(nbytes)} of every peer's shared memory"


def available_nbytes() -> int | None:
    """Bytes that can still be used, by the machine and by this container; None if nobody says."""
    limits = [value for value in (_machine_nbytes(), cgroups.free_memory_nbytes()) if value is not None]
    return min(limits, default=None)


def _machine_nbytes() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return None


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes < 1e9 else f"{nbytes / 1e9:.1f} GB"
