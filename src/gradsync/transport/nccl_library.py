"""NCCL's C functions, as torch has loaded them: called by ctypes, which lets other Python threads run meanwhile."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from functools import lru_cache

import torch

NAME = "libnccl.so.2"
OLDEST = (2, 14)  # the first whose host id and abort are those that we rely on

SUM = 0  # the operation
_CODES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
BYTES = _CODES[torch.uint8]


class UniqueId(ctypes.Structure):
    """The id by which the ranks of a communicator know each other; rank 0 makes it."""

    _fields_ = (("internal", ctypes.c_ubyte * 128),)


# By name: the types of its arguments. All return a code, 0 for success.
_FUNCTIONS: dict[str, Sequence[object]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclCommInitRank": (POINTER(c_void_p), c_int, UniqueId, c_int),
    "ncclCommDestroy": (c_void_p,),
    "ncclCommAbort": (c_void_p,),
    "ncclCommGetAsyncError": (c_void_p, POINTER(c_int)),
    "ncclAllReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclBroadcast": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclAllGather": (c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p),
    "ncclSend": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclRecv": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
}


class NcclError(RuntimeError):
    """A call of NCCL that did not succeed."""


class NcclLibrary:
    """The functions, each raising `NcclError` if it does not succeed."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.ncclGetLastError.restype = library.ncclGetErrorString.restype = c_char_p
        library.ncclGetLastError.argtypes, library.ncclGetErrorString.argtypes = (c_void_p,), (c_int,)
        for name, types in _FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, c_int
        self._library = library
        # The functions of the hot path, one look-up shorter.
        self.all_reduce, self.all_gather, self.broadcast = (
            library.ncclAllReduce, library.ncclAllGather, library.ncclBroadcast,
        )  # fmt: skip
        self.send, self.recv = library.ncclSend, library.ncclRecv
        self.group_start, self.group_end = library.ncclGroupStart, library.ncclGroupEnd

    def version(self) -> tuple[int, int, int]:
        """The version of NCCL, such as (2, 28, 9)."""
        code = c_int()
        self.check(self._library.ncclGetVersion(byref(code)))
        return code.value // 10000, code.value % 10000 // 100, code.value % 100

    def unique_id(self) -> bytes:
        """A new name for a communicator; NCCL listens for its members from now on."""
        name = UniqueId()
        self.check(self._library.ncclGetUniqueId(byref(name)))
        return bytes(name.internal)

    def connect(self, name: bytes, rank: int, size: int) -> c_void_p:
        """A communicator on this thread's current GPU; returns when all its members have come."""
        handle = c_void_p()
        self.check(self._library.ncclCommInitRank(byref(handle), size, UniqueId.from_buffer_copy(name), rank))
        return handle

    def destroy(self, handle: c_void_p) -> None:
        """End a communicator on which nothing is under way, on any rank."""
        self.check(self._library.ncclCommDestroy(handle))

    def abort(self, handle: c_void_p) -> None:
        """End a communicator and whatever is under way on it."""
        self.check(self._library.ncclCommAbort(handle))

    def failure(self, handle: c_void_p) -> str | None:
        """Return what went wrong on a communicator while it worked; None: nothing."""
        code = c_int()
        self.check(self._library.ncclCommGetAsyncError(handle, byref(code)))
        return None if code.value in _GOES_ON else self._describe(code.value)

    def check(self, code: int) -> None:
        """Raise if a function did not return success."""
        if code:
            raise NcclError(self._describe(code))

    def _describe(self, code: int) -> str:
        what, last = self._library.ncclGetErrorString(code), self._library.ncclGetLastError(None)
        return f"NCCL: {what.decode()}" + (f" ({last.decode().strip()[:300]})" if last and last.strip() else "")


_GOES_ON = (0, 7)  # success, in progress


def code_of(dtype: torch.dtype) -> int:
    """NCCL's number for a type of elements."""
    try:
        return _CODES[dtype]
    except KeyError:
        raise TypeError(f"NCCL cannot add up {dtype} tensors") from None


@lru_cache(maxsize=1)
def load_nccl() -> NcclLibrary:
    """The library that torch uses; raises ImportError if there is none, or an old one."""
    try:
        library = NcclLibrary(ctypes.CDLL(NAME))
    except (OSError, AttributeError):
        raise ImportError(
            f"gradsync needs NCCL as a library of its own ({NAME}), which PyTorch's CUDA wheels bring: "
            "pip install the nvidia-nccl package of your CUDA version"
        ) from None
    if (found := library.version())[:2] < OLDEST:
        wanted, has = (".".join(map(str, each)) for each in (OLDEST, found))
        raise ImportError(f"gradsync needs NCCL {wanted} or newer, found {has}")
    return library
