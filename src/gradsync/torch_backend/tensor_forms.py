"""Tensors that cannot be sent as they are: gloo, and shared memory, would read and write beyond their ends.

Both take as many elements as the tensor has from where it begins, whatever its strides. One whose elements share memory
(expanded, say) has less memory than that; torch's own gloo crashes, or changes what lies behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

# Gathers, and the inputs of reduce-scatters, are copied first, by torch as by us.
_BY_POINTER = frozenset(
    {
        *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "scatter"),
        *("alltoall", "alltoall_base", "all_to_all_single"),
    }
)
_CUT = frozenset(
    {
        *("_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
        *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    }
)


def check(name: str, args: tuple[Any, ...]) -> None:
    """Raise ValueError where a collective would leave a tensor's memory; torch's name for it, and what it got."""
    if name in _BY_POINTER:
        for tensor in _tensors(args):
            if _shares_memory(tensor):
                raise ValueError(
                    f"{name} takes {tensor.numel()} elements where the tensor begins, but those of shape "
                    f"{tuple(tensor.shape)} with strides {tensor.stride()} share memory: clone() it first"
                )
    elif name in _CUT and any(tensor.dim() == 0 for tensor in _tensors(args)):
        raise ValueError(f"{name} cuts a tensor along its first dimension, and one without dimensions has none")


def _tensors(args: Any) -> Iterator[torch.Tensor]:
    for each in args:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from _tensors(each)


def _shares_memory(tensor: torch.Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.is_contiguous() or tensor.numel() <= 1:
        return False
    reach = 0  # how far elements lie apart within the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
