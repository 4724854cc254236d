"""What is measured: per method the fewest bytes, what it sends, and who encodes and decodes it how."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import eager
import torch
from torch import Tensor

from gradsync.kernels import block_kernels, powersgd_kernels
from gradsync.kernels.block_kernels import BlockTable, Code, Method, Mode

MATRIX = (768, 3072)
RANK = 4
KEPT = 10
RANKS = (2, 8)
CODES = {
    "int8": Code(Method.INT8, 256),
    "int4": Code(Method.INT4, 256),
    "sign": Code(Method.SIGN, 1024),
    "top-k": Code(Method.TOPK, 1024),
}
_HOOKS = {"cast": (eager.fp16_hook_encode, eager.cast_decode)}
_HOOKS["int8"] = (eager.quantization_hook_encode, eager.quantization_hook_decode)
Act = Callable[[], object]


class Buffers(NamedTuple):
    flat: Tensor
    residual: Tensor
    out: Tensor


class Task(NamedTuple):
    """One method. Arms are named "who phase", such as "eager encode" or "ours decode 8"."""

    name: str
    fewest_nbytes: dict[str, float]  # by phase
    sent_nbytes: float
    arms: dict[str, Act]
    reset: Act  # before every turn: arms change residuals, and some let them grow from turn to turn


def make_buffers(num_matrices: int, device: str) -> Buffers:
    size = num_matrices * MATRIX[0] * MATRIX[1]
    flat = torch.randn(size, device=device)
    return Buffers(flat, torch.randn(size, device=device), torch.empty_like(flat))


def reset_of(*tensors: Tensor) -> Act:
    """Fresh random numbers: what is timed are never zeros, infinities or leftovers."""

    def reset() -> None:
        for tensor in tensors:
            tensor.normal_()

    return reset


def make_table(code: Code, num_elements: int, device: str) -> BlockTable:
    """Whole blocks only."""
    block, count = code.block, num_elements // code.block
    kept = KEPT if code.method == Method.TOPK else 0
    head = 2 * kept or 4
    body = {Method.INT8: block, Method.INT4: block // 2, Method.SIGN: block // 8, Method.TOPK: (kept + 7) // 8 * 16}
    i = torch.arange(count, device=device)
    bodies = (head * count + 15) // 16 * 16
    columns = (i * block, i * 0 + block, i * head, bodies + i * body[code.method], i * block, i * 0, i * 0 + kept)
    return BlockTable(torch.stack(columns, 1).int(), bodies + count * body[code.method])


def tasks(buffers: Buffers, compiled: bool) -> list[Task]:
    return [
        _cast(buffers, compiled),
        *(_blocks(name, buffers, compiled) for name in CODES),
        _powersgd(buffers, compiled),
    ]


def _eager_arms(name: str, buffers: Buffers, compiled: bool) -> dict[str, Act]:
    """Eager, compiled, and PyTorch's hook where there is one."""
    stem = name.replace("-", "")
    pair = (getattr(eager, f"{stem}_encode"), getattr(eager, f"{stem}_decode"))
    pairs = {"eager": pair}
    if compiled:
        pairs["compiled"] = (torch.compile(pair[0], dynamic=False), torch.compile(pair[1], dynamic=False))
    if name in _HOOKS:
        pairs["hook"] = _HOOKS[name]
    arms: dict[str, Act] = {}
    for who, (encode, decode) in pairs.items():
        sent = encode(buffers.flat, buffers.residual)
        arms[f"{who} encode"] = lambda encode=encode: encode(buffers.flat, buffers.residual)
        arms[f"{who} decode 1"] = lambda decode=decode, sent=sent: decode(sent, buffers.out)
    return arms


def _cast(buffers: Buffers, compiled: bool) -> Task:
    size = buffers.flat.numel()
    half = torch.empty_like(buffers.flat, dtype=torch.bfloat16)
    arms: dict[str, Act] = {"copy": lambda: buffers.out.copy_(buffers.flat), "fill": lambda: buffers.out.zero_()}
    arms |= {"ours encode": lambda: half.copy_(buffers.flat), "ours decode 1": lambda: buffers.out.copy_(half)}
    nbytes = {"copy": 8.0 * size, "fill": 4.0 * size, "encode": 6.0 * size, "decode 1": 6.0 * size}
    return Task("cast", nbytes, 2.0 * size, arms | _eager_arms("cast", buffers, compiled), reset_of(buffers.residual))


def _blocks(name: str, buffers: Buffers, compiled: bool) -> Task:
    """Decoding n payloads, as an owner of a part does, is measured on an n-th of the elements."""
    code, (flat, residual, out) = CODES[name], buffers
    size = flat.numel()
    table = make_table(code, size, flat.device.type)
    payloads = torch.zeros(max(RANKS), table.nbytes, dtype=torch.uint8, device=flat.device)
    for payload in payloads:
        block_kernels.encode(code, flat, None, table, payload, Mode.NONE, 0)
    sent = table.nbytes
    arms: dict[str, Act] = {
        "ours encode": lambda: block_kernels.encode(code, flat, residual, table, payloads[0], Mode.FEEDBACK, 0)
    }
    nbytes = {"encode": 12.0 * size + sent}
    for n in (1, *RANKS):
        part = BlockTable(table.rows[: len(table.rows) // n], table.nbytes)
        nbytes[f"decode {n}"] = 4.0 * size / n + sent
        arms[f"ours decode {n}"] = lambda n=n, part=part: block_kernels.decode(code, payloads[:n], part, out)
    return Task(name, nbytes, sent, arms | _eager_arms(name, buffers, compiled), reset_of(residual))


def _powersgd(buffers: Buffers, compiled: bool) -> Task:
    """All passes are one phase: between them only small factors travel."""
    grad, residual = (tensor.view(-1, *MATRIX) for tensor in (buffers.out.normal_(), buffers.residual))
    q = torch.randn(len(grad), MATRIX[1], RANK, device=grad.device)
    p = torch.randn(len(grad), MATRIX[0], RANK, device=grad.device)

    def ours() -> None:
        left = powersgd_kernels.project(grad, residual, q)
        powersgd_kernels.orthogonalize(left)
        right = powersgd_kernels.project_back(residual, left)
        powersgd_kernels.restore(grad, residual, left, right, right)

    arms: dict[str, Act] = {
        "ours encode": ours,
        "ours project": lambda: powersgd_kernels.project(grad, residual, q),
        "ours orthogonalize": lambda: powersgd_kernels.orthogonalize(p),
        "ours project_back": lambda: powersgd_kernels.project_back(residual, p),
        "ours restore": lambda: powersgd_kernels.restore(grad, residual, p, q, q),
        "hook encode": lambda: eager.powersgd_hook(grad, residual, q),
    }
    if compiled:
        fused = torch.compile(eager.powersgd_hook, dynamic=False)
        arms["compiled encode"] = lambda: fused(grad, residual, q)
    size, factors = grad.numel(), 4 * (p.numel() + q.numel())
    nbytes = {"encode": 20.0 * size, "project": 12.0 * size, "project_back": 4.0 * size, "restore": 12.0 * size}
    return Task("PowerSGD", nbytes, factors, arms, reset_of(grad, residual, p, q))
