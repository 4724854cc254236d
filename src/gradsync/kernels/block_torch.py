"""The results that the kernels of block codes compute, in torch on any device: see Note [Codes] in `block_kernels`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradsync.kernels.block_kernels import BODY, FIRST, HEAD, KEPT, LENGTH, PARAM, START, BlockTable, Code, Method, Mode

SMALLEST = 2.0**-100
LOST = 2.0**127
SIGN_UNIT = 32768.0
_LEVELS = {Method.INT8: 127.0, Method.INT4: 7.0}
_WORD = 0xFFFFFFFF
_Bits = TypeVar("_Bits", int, Tensor)


class _Group(NamedTuple):
    """All blocks of one length and one number of kept elements: each tensor has a row per block."""

    length: int
    kept: int
    where: Tensor  # the elements in the flat tensor
    head: Tensor  # the first byte of each, as a column
    body: Tensor
    element: Tensor  # the elements in their parameters
    param: Tensor


class _Coded(NamedTuple):
    """The blocks as coded: bytes, and the values that a receiver will see."""

    head: Tensor
    body: Tensor
    decoded: Tensor


def encode(
    code: Code, flat: Tensor, residual: Tensor | None, table: BlockTable, payload: Tensor, mode: Mode, key: int
) -> None:
    """Write the code of every block of `flat` into `payload`, and what it loses into `residual`."""
    for group in _groups(table):
        v = flat[group.where].float()
        before = torch.zeros_like(v) if residual is None else residual[group.where]
        if mode == Mode.FEEDBACK:
            v = v + before
        m = v.abs().amax(1, keepdim=True)
        lost = ~(m < LOST)
        v, m = v.masked_fill(lost, 0.0), m.masked_fill(lost, 0.0)
        coded = _encode_blocks(code, group, v, m, lost, key)
        _put(payload, group.head, coded.head, 4)
        _put(payload, group.body, coded.body, 16)
        if residual is not None and mode != Mode.NONE:
            left = v - coded.decoded
            residual[group.where] = torch.where(lost, before, before + left if mode == Mode.ABSORB else left)


def decode(code: Code, payloads: Tensor, table: BlockTable, flat: Tensor) -> None:
    """Set every block of `flat` to the sum of its codes in the rows of `payloads`, added in order in fp32."""
    for group in _groups(table):
        total = _decode_blocks(code, group, payloads[0])
        for payload in payloads[1:]:
            total = total + _decode_blocks(code, group, payload)
        flat[group.where] = total.to(flat.dtype)


def dither(key: int, param: Tensor, index: Tensor) -> Tensor:
    """32 bits for each element, as int64: a hash of the key, the parameter's number and the index in the parameter.

    >>> dither(7, torch.tensor([1]), torch.tensor([0, 1]))
    tensor([1223908485, 3823699146])
    """
    salt = _mix(key & _WORD)  # a number: making a tensor of it would wait for the device
    return _mix((index & _WORD) ^ _mix((param & _WORD) ^ salt))


def _mix(x: _Bits) -> _Bits:
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _WORD
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def _groups(table: BlockTable) -> Iterator[_Group]:
    rows = table.rows.long()
    kinds = rows[:, LENGTH] << 32 | rows[:, KEPT]
    for kind in kinds.unique().tolist():
        length, kept = kind >> 32, kind & _WORD
        columns = rows[kinds == kind].unsqueeze(-1).unbind(1)
        step = torch.arange(length, device=rows.device)
        yield _Group(
            length, kept, columns[START] + step, columns[HEAD], columns[BODY], columns[FIRST] + step, columns[PARAM]
        )


# Encoding: v has a row per block, m its largest absolute value as a column; both are 0 where the block is lost.


def _encode_blocks(code: Code, group: _Group, v: Tensor, m: Tensor, lost: Tensor, key: int) -> _Coded:
    if code.method == Method.TOPK:
        return _encode_topk(v, group.kept, lost)
    if code.method == Method.SIGN:
        return _encode_sign(v, m, lost)
    levels = _LEVELS[code.method]
    scaled = v * _over(m, levels)
    if code.stochastic:
        uniform = (dither(key, group.param, group.element) >> 8).float() * 2.0**-24
        q = (scaled + uniform).floor().clamp(-levels, levels).int()
    else:
        q = scaled.round().int()
    scale = (m / torch.full_like(m, levels)).masked_fill(m < SMALLEST, 0.0)
    body = _bytes_of(q.to(torch.int8)) if code.method == Method.INT8 else _nibbles_of(q)
    return _Coded(_bytes_of(scale.masked_fill(lost, torch.nan)), body, q.float() * scale)


def _encode_sign(v: Tensor, m: Tensor, lost: Tensor) -> _Coded:
    length = v.shape[1]
    sums = (v.abs() * _over(m, SIGN_UNIT) + 0.5).floor().long().sum(1, keepdim=True)
    scale = m * (sums.float() / torch.full_like(m, SIGN_UNIT * length))
    positive = ~v.signbit()
    bits = pad(positive & ~lost, (0, -length % 8)).view(len(v), -1, 8)
    weights = 1 << torch.arange(8, device=v.device)
    body = (bits * weights).sum(2).to(torch.uint8)
    return _Coded(_bytes_of(scale.masked_fill(lost, torch.nan)), body, torch.where(positive, scale, -scale))


def _encode_topk(v: Tensor, kept: int, lost: Tensor) -> _Coded:
    values = v.to(torch.bfloat16)
    size = (values.view(torch.int16) & 0x7FFF).long()
    order = (size << 16) + torch.arange(v.shape[1] - 1, -1, -1, device=v.device)  # among equals the lower index wins
    chosen = order.topk(kept, dim=1).indices.sort(1).values
    sent = values.gather(1, chosen)
    decoded = torch.zeros_like(v).scatter_add_(1, chosen, sent.float())
    return _Coded(_bytes_of(chosen.to(torch.int16)), _bytes_of(sent.masked_fill(lost, torch.nan)), decoded)


def _over(m: Tensor, levels: float) -> Tensor:
    """levels / m, 0 where m is too small. A tensor divided by a tensor: torch multiplies by a number's reciprocal."""
    return (torch.full_like(m, levels) / m).masked_fill(m < SMALLEST, 0.0)


def _nibbles_of(q: Tensor) -> Tensor:
    half = (q.shape[1] + 31) // 32 * 16
    low, high = (pad(q, (0, 2 * half - q.shape[1])) + 8).split(half, dim=1)
    return (low | high << 4).to(torch.uint8)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _put(payload: Tensor, first: Tensor, codes: Tensor, align: int) -> None:
    codes = pad(codes, (0, -codes.shape[1] % align))
    payload[first + torch.arange(codes.shape[1], device=codes.device)] = codes


# Decoding


def _decode_blocks(code: Code, group: _Group, payload: Tensor) -> Tensor:
    length, kept = group.length, group.kept
    if code.method == Method.TOPK:
        chosen = _get(payload, group.head, 2 * kept).view(torch.int16).long() & 0xFFFF
        sent = _get(payload, group.body, 2 * kept).view(torch.bfloat16).float()
        return torch.zeros(group.where.shape, device=payload.device, dtype=torch.float32).scatter_add_(1, chosen, sent)
    scale = _get(payload, group.head, 4).view(torch.float32)
    if code.method == Method.INT8:
        return _get(payload, group.body, length).view(torch.int8).float() * scale
    if code.method == Method.INT4:
        packed = _get(payload, group.body, (length + 31) // 32 * 16).int()
        return (torch.cat((packed & 15, packed >> 4), dim=1)[:, :length] - 8).float() * scale
    packed = _get(payload, group.body, (length + 7) // 8)
    bits = packed.unsqueeze(2) >> torch.arange(8, device=packed.device) & 1
    return torch.where(bits.flatten(1)[:, :length].bool(), scale, -scale)


def _get(payload: Tensor, first: Tensor, nbytes: int) -> Tensor:
    return payload[first + torch.arange(nbytes, device=first.device)]
