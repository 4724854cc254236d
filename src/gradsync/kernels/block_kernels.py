"""Codes of blocks: a flat tensor, block by block, into few bytes and back, in one pass. The door to the kernels.

    flat       │ param a ──────────── │ param b ── │ c │        one dtype, parameters on borders of 64 bytes
    blocks     │ 0 │ 1 │ 2 │ 3 (short)│ 4 │ 5 (short)│ 6 │      no block crosses a parameter's border
    payload    │ heads of all blocks │ bodies of all blocks │   per part of the table, see `BlockTable`

On the CPU the C library does it, on a GPU Triton does; `block_torch` is what both compute, in torch, and what
serves where neither is at hand. All three give the same bits.

Note [Codes]
    v is what a block has to say (all arithmetic in fp32, no contraction), m = max |v|.

    INT8   scale = m / 127, q = round_half_even(v · (127 / m)) in −127…127, one byte each; d = q · scale
    INT4   the same with 7: byte j holds q[j] + 8 in its low half and q[j + H] + 8 in its high half, H = body bytes;
           where there is no such element the half is 8
    SIGN   bit i of the body (byte i / 8, bit i % 8) is 1 where v[i] has its sign bit clear; d = ±scale, where
           scale is the mean of |v|, in whole numbers so that no order of adding matters:
           scale = m · (Σ floor(|v| · (32768 / m) + 0.5) / (32768 · length)), the sum in int64, then in fp32
    TOPK   the `kept` elements with the largest |bf16(v)|, lower index first among equals; the head holds their
           indices in the block as uint16, ascending, the body their values as bf16; d = bf16(v) there, 0 elsewhere

    The head of the first three is the scale as one fp32. d is what the receiver computes: q is a whole number, so that
    q = 0 gives +0; TOPK's d is bf16(v) + 0, never −0, so that adding only what was sent equals adding everything.

    With stochastic rounding (INT8, INT4) q = floor(v · (levels / m) + u), clamped, where u = (h >> 8) · 2⁻²⁴ and
    h = dither(key, param, first + i).

    m < 2⁻¹⁰⁰ (all zeros too): 0 stands for levels / m, 32768 / m and the scale, so every q and d = ±0 (SIGN: the bits
    are v's signs as ever); TOPK sends bf16 values as they are.
    m ≥ 2¹²⁷ or NaN: the block is lost. The scale is NaN, so every d is NaN (body: zeros; INT4: bytes 0x88; TOPK:
    indices 0, 1, …, kept − 1 and values NaN), and the residual stays as it was: a NaN reaches the user, and is gone
    in the next step. Not only infinities: near the end of fp32 q · scale and bf16(v) overflow, and an infinite
    residual would never go away. NaN is 0x7fc00000 in a head, 0x7fc0 in a body.

Note [Residuals]
    NONE       v = flat
    FEEDBACK   v = flat + residual; then residual = v − d
    ABSORB     v = flat; then residual = residual + (v − d): what a sum loses when it is encoded a second time

Bytes of the body are rounded up to a multiple of 16, with zeros (INT4: see there), those of a head to a multiple of 4.
Bytes of the payload that belong to no head and no body are not written.
"""

from __future__ import annotations

from ctypes import CDLL
from enum import IntEnum
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import torch

from gradsync.kernels.library import CODES, load

ALIGN_NBYTES = 16
MAX_BLOCK = 1 << 16  # an index in a block has 16 bits


class Method(IntEnum):
    """The method by which a block is coded; see [Codes]."""

    INT8 = 0
    INT4 = 1
    SIGN = 2
    TOPK = 3


class Mode(IntEnum):
    """The way to treat what a code loses; see [Residuals]."""

    NONE = 0
    FEEDBACK = 1
    ABSORB = 2


class Code(NamedTuple):
    """A way to code blocks."""

    method: Method
    block: int  # a power of two: elements of a whole block
    stochastic: bool = False


class BlockTable(NamedTuple):
    """The places of each block's elements and codes.

    `rows` is an int32 tensor of one row per block, on the device of the flat tensor, with the columns
    START (its first element in the flat tensor), LENGTH, HEAD and BODY (where these begin in the payload, in bytes),
    FIRST (its first element's index in the parameter), PARAM (a number for the parameter: its bits, as int32),
    KEPT (how many elements TOPK keeps; otherwise 0).
    """

    rows: torch.Tensor
    nbytes: int  # of the payload


START, LENGTH, HEAD, BODY, FIRST, PARAM, KEPT = range(7)


def encode(
    code: Code,
    flat: torch.Tensor,
    residual: torch.Tensor | None,
    table: BlockTable,
    payload: torch.Tensor,
    mode: Mode,
    key: int,
) -> None:
    """Write the code of every block of `flat` into `payload`, and what it loses into `residual`, as `mode` says.

    `flat` has any floating dtype, `residual` is fp32 and as long (None will do where the mode is NONE), `payload` is
    uint8 and begins on a border of 16 bytes. `key` is 32 bits that differ by seed, step and phase: stochastic
    rounding uses them.

    >>> table = BlockTable(torch.tensor([[0, 4, 0, 16, 0, 0, 0]], dtype=torch.int32), nbytes=32)
    >>> payload = torch.zeros(32, dtype=torch.uint8)
    >>> encode(Code(Method.INT8, 4), torch.tensor([127.0, -3, 2.2, 0]), None, table, payload, Mode.NONE, key=0)
    >>> payload[16:20].view(torch.int8)
    tensor([127,  -3,   2,   0], dtype=torch.int8)
    """
    assert mode == Mode.NONE or residual is not None, f"{mode.name} needs a residual"
    assert payload.numel() >= table.nbytes, f"the payload has {payload.numel()} bytes, the table {table.nbytes}"
    if table.rows.numel() == 0:
        return
    library = _library_for(flat)
    if library is None:
        _codes_for(flat).encode(code, flat, residual, table, payload, mode, key)
        return
    assert all(tensor.is_contiguous() for tensor in (table.rows, flat, payload))
    assert residual is None or (residual.is_contiguous() and residual.dtype == torch.float32)
    assert payload.data_ptr() % ALIGN_NBYTES == 0
    library.gradsync_encode_blocks(
        code.method,
        code.stochastic,
        mode,
        CODES[flat.dtype],
        flat.data_ptr(),
        None if residual is None else residual.data_ptr(),
        table.rows.data_ptr(),
        len(table.rows),
        payload.data_ptr(),
        key & 0xFFFFFFFF,
    )


def decode(code: Code, payloads: torch.Tensor, table: BlockTable, flat: torch.Tensor) -> None:
    """Set every block of `flat` to the sum of its codes in the rows of `payloads`.

    They are added in order in fp32, from row 0 on, and rounded once. What is in no block stays as it was.

    >>> table = BlockTable(torch.tensor([[1, 2, 0, 16, 0, 0, 0]], dtype=torch.int32), nbytes=32)
    >>> payloads = torch.zeros(2, 32, dtype=torch.uint8)
    >>> for payload, value in zip(payloads, (127.0, 254.0)):
    ...     encode(Code(Method.INT8, 2), torch.full((4,), value), None, table, payload, Mode.NONE, key=0)
    >>> flat = torch.zeros(4)
    >>> decode(Code(Method.INT8, 2), payloads, table, flat)
    >>> flat
    tensor([  0., 381., 381.,   0.])
    """
    assert payloads.shape[1] >= table.nbytes, f"payloads have {payloads.shape[1]} bytes, the table {table.nbytes}"
    if table.rows.numel() == 0:
        return
    library = _library_for(flat)
    if library is None:
        _codes_for(flat).decode(code, payloads, table, flat)
        return
    assert all(tensor.is_contiguous() for tensor in (table.rows, flat, payloads[0]))
    library.gradsync_decode_blocks(
        code.method,
        CODES[flat.dtype],
        payloads.data_ptr(),
        len(payloads),
        payloads.stride(0),
        table.rows.data_ptr(),
        len(table.rows),
        flat.data_ptr(),
    )


def _library_for(flat: torch.Tensor) -> CDLL | None:
    return load() if flat.device.type == "cpu" else None


def _codes_for(flat: torch.Tensor) -> ModuleType:
    """The module that serves where the C library does not. Imported late: both import this one for its types."""
    if flat.is_cuda and flat.dtype != torch.float64 and find_spec("triton"):
        return import_module("gradsync.kernels.block_triton")
    return import_module("gradsync.kernels.block_torch")
