"""Compressions as one writes them in torch, and the arithmetic of PyTorch's own communication hooks.

Each `encode` changes the residual in place and returns what would be sent; each `decode` writes the sum into `out`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize
from torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks import (
    _dequantize_per_tensor_backend,
    _quantize_per_tensor_backend,
)

Sent = tuple[Tensor, ...]


def cast_encode(flat: Tensor, residual: Tensor) -> Sent:
    return (flat.to(torch.bfloat16),)


def cast_decode(sent: Sent, out: Tensor) -> None:
    out.copy_(sent[0])


def integers_encode(flat: Tensor, residual: Tensor, levels: int, block: int = 256) -> Sent:
    left = residual.view(-1, block)
    left += flat.view(-1, block)
    scale = left.abs().amax(1, keepdim=True) / levels
    q = (left / scale).round()
    left -= q * scale
    whole = q.to(torch.int8)
    if levels == 7:
        low, high = whole.add_(8).chunk(2, dim=1)
        whole = low | high << 4
    return whole, scale


def int8_encode(flat: Tensor, residual: Tensor) -> Sent:
    return integers_encode(flat, residual, 127)


def int8_decode(sent: Sent, out: Tensor) -> None:
    torch.mul(sent[0], sent[1], out=out.view(-1, sent[0].shape[1]))


def int4_encode(flat: Tensor, residual: Tensor) -> Sent:
    return integers_encode(flat, residual, 7)


def int4_decode(sent: Sent, out: Tensor) -> None:
    packed, scale = sent
    halves = torch.cat((packed & 15, (packed >> 4) & 15), dim=1)
    torch.mul(halves - 8, scale, out=out.view(-1, halves.shape[1]))


def sign_encode(flat: Tensor, residual: Tensor, block: int = 1024) -> Sent:
    left = residual.view(-1, block)
    left += flat.view(-1, block)
    scale = left.abs().mean(1, keepdim=True)
    positive = left >= 0
    left -= torch.where(positive, scale, -scale)
    weights = 1 << torch.arange(8, device=flat.device, dtype=torch.uint8)
    return (positive.view(-1, block // 8, 8) * weights).sum(2, dtype=torch.uint8), scale


def sign_decode(sent: Sent, out: Tensor) -> None:
    packed, scale = sent
    bits = packed.unsqueeze(2) >> torch.arange(8, device=out.device, dtype=torch.uint8) & 1
    out.view(len(scale), -1).copy_(torch.where(bits.flatten(1).bool(), scale, -scale))


def topk_encode(flat: Tensor, residual: Tensor, block: int = 1024, kept: int = 10) -> Sent:
    left = residual.view(-1, block)
    left += flat.view(-1, block)
    chosen = left.abs().topk(kept, dim=1, sorted=False).indices
    values = left.gather(1, chosen).to(torch.bfloat16)
    left.scatter_add_(1, chosen, -values.float())
    return chosen.to(torch.int16), values


def topk_decode(sent: Sent, out: Tensor) -> None:
    chosen, values = sent
    out.zero_()
    out.view(len(chosen), -1).scatter_(1, chosen.long(), values.float())


# PyTorch's hooks


def fp16_hook_encode(flat: Tensor, residual: Tensor) -> Sent:
    """`fp16_compress_hook`: cast and divide."""
    return (flat.to(torch.float16).div_(2),)


def quantization_hook_encode(flat: Tensor, residual: Tensor) -> Sent:
    """`quantization_pertensor_hook`: one scale for all, no feedback. The one per channel launches a kernel per 512."""
    low, high = flat.aminmax()
    scale = (high - low) / 255
    zero = -(low / scale).round()
    return _quantize_per_tensor_backend(flat, scale, zero), scale, zero


def quantization_hook_decode(sent: Sent, out: Tensor) -> None:
    out.copy_(_dequantize_per_tensor_backend(*sent))


def powersgd_hook(grad: Tensor, residual: Tensor, q: Tensor) -> Tensor:
    """`powerSGD_hook`: its passes over the matrices, without the exchange; returns the next residual."""
    grad.add_(residual)
    kept = grad.clone()
    p = torch.bmm(grad, q)
    _orthogonalize(p)
    torch.bmm(grad.mT, p, out=q)
    torch.bmm(p, q.mT, out=grad)
    return kept - grad
