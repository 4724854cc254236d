"""The C library, if it was built: found beside this file, called through ctypes, which releases the interpreter."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char, c_char_p, c_double, c_int, c_int32, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path

import torch

NUM_STREAMS = 3
MAX_RANKS = 256
LABEL_NBYTES = 64
NUM_SLOTS = 4

# The order is that of `enum dtype` in native/sums.h.
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)
CODES = {dtype: code for code, dtype in enumerate(DTYPES)} | {torch.uint8: DTYPES.index(torch.int8)}


class OpKind(IntEnum):
    """The kind of an operation; see native/team.c."""

    SMALL = 0
    DIRECT = 1
    STAGED = 2
    SCATTER = 3
    GATHER = 4
    SHED = 5
    SHARE = 6


class Progress(IntEnum):
    """The progress of an operation."""

    DONE = 0
    PENDING = 1
    MISMATCH = 2
    DEAD = 3
    ABORTED = 4


class Op(ctypes.Structure):
    """One operation: `op_t` in native/team.c."""

    _fields_ = (
        ("label", c_char * LABEL_NBYTES),
        ("data", c_void_p),
        ("bases", c_void_p),
        ("bounds", c_void_p),
        ("count", c_uint64),
        ("scale", c_double),
        ("kind", c_int32),
        ("dtype", c_int32),
        ("finished_at", c_double),
        ("begun", c_int32),
        ("culprit", c_int32),
        ("piece", c_uint32),
        ("step", c_uint32),
    )


@cache
def load() -> ctypes.CDLL | None:
    """The library; None where it was not built, or was built from other sources than these."""
    for path in sorted(Path(__file__).parent.glob("_native*.so")):
        try:
            library = ctypes.CDLL(str(path))
            _declare(library)
        except (OSError, AttributeError):
            continue
        if library.gradsync_op_nbytes() == ctypes.sizeof(Op):
            return library
    return None


def _declare(library: ctypes.CDLL) -> None:
    numbers = POINTER(c_uint64)
    for name, result, *arguments in (
        ("use_level", c_int, c_char_p),
        ("level", c_char_p),
        ("sum", None, c_void_p, c_int, c_void_p, c_int, c_uint64, c_int, c_double),
        ("encode_blocks", None, *[c_int] * 4, *[c_void_p] * 3, c_uint64, c_void_p, c_uint32),
        ("decode_blocks", None, c_int, c_int, c_void_p, c_int, c_uint64, c_void_p, c_uint64, c_void_p),
        ("digest", c_uint64, c_void_p, c_uint64),
        ("project", c_int, *[c_void_p] * 4, *[c_uint64] * 3),
        ("project_back", c_int, *[c_void_p] * 3, *[c_uint64] * 3),
        ("restore", c_int, *[c_void_p] * 5, *[c_uint64] * 3),
        ("op_nbytes", c_uint64),
        ("arena_nbytes", c_uint64, c_int, numbers, numbers),
        ("open", c_void_p, c_int, c_int, c_void_p, POINTER(c_int), numbers, numbers, c_int),
        ("advance", c_int, c_void_p, c_int, POINTER(Op), c_double),
        ("post", None, c_void_p, c_int, c_void_p, c_uint64),
        ("collect", c_int, c_void_p, c_int, c_void_p, c_uint64, c_double, POINTER(c_int)),
        ("label", c_void_p, c_void_p, c_int, c_int),
        ("job_label", c_void_p, c_void_p, c_int),
        ("submit", c_void_p, c_void_p, POINTER(Op)),
        ("wait", c_int, c_void_p, c_void_p, c_double, POINTER(c_double), POINTER(c_int)),
        ("release", None, c_void_p),
        ("abort", None, c_void_p),
        ("abandon", None, c_void_p),
        ("close", None, c_void_p),
    ):
        function = getattr(library, f"gradsync_{name}")
        function.restype = result
        function.argtypes = arguments
