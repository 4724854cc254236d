"""Tensors as one run of bytes on the host, and back.

    │ 1 0 1 │ tensor 0 ···· │ tensor 2 ·· │     first which of them are there, a byte each
    └ 16 ┘ every part begins at a multiple of 16 bytes, so that it can be seen as its own type

A parameter without a gradient travels as the 0 alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_ALIGN = 16


def pack(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """A new tensor of bytes that holds all of them.

    >>> w = torch.tensor([1.0, 2.0])
    >>> unpack(pack([w, None]), [w, w])
    [tensor([1., 2.]), None]
    """
    begins = _aligned(len(tensors))
    total = begins + sum(_aligned(t.nbytes) for t in tensors if t is not None)
    freight = torch.empty(total, dtype=torch.uint8, device="cpu")
    freight[:begins] = 0
    for index, tensor in enumerate(tensors):
        if tensor is not None:
            freight[index] = 1
            place = freight[begins : begins + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor.detach())
            begins += _aligned(tensor.nbytes)
    return freight


def unpack(freight: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """What `pack` was given, as views of the freight; `like` tells the types and shapes."""
    begins = _aligned(len(like))
    tensors: list[torch.Tensor | None] = []
    for there, model in zip(freight[: len(like)].tolist(), like, strict=True):
        if not there:
            tensors.append(None)
            continue
        tensors.append(freight[begins : begins + model.nbytes].view(model.dtype).view(model.shape))
        begins += _aligned(model.nbytes)
    return tensors


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
