"""The ranks of a test that was written for the host, on GPUs over NCCL: what torch makes lies on the rank's GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map_only

_DRAWN = {torch.rand, torch.randn, torch.randint, torch.randperm}
_DRAWN_IN_PLACE = {torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.random_, torch.Tensor.bernoulli_}


class OnGpu(TorchFunctionMode):
    """Makes tensors on the current GPU; random numbers are drawn on the host, so that they are those of the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWN and kwargs.get("device") is None:
            return func(*args, **kwargs | {"device": "cpu"}).cuda()
        if getattr(func, "__module__", "") == "torch.nn.init" and "tensor" in kwargs:  # it draws where we do not see it
            drawn = func(**kwargs | {"tensor": kwargs["tensor"].detach().cpu()})
            with torch.no_grad():
                return kwargs["tensor"].copy_(drawn)
        if func in _DRAWN_IN_PLACE and args[0].is_cuda and not args[0].is_sparse:
            drawn = torch.empty(args[0].shape, dtype=args[0].dtype, device="cpu")
            return args[0].copy_(func(drawn, *args[1:], **kwargs))
        if func in _device_constructors() and kwargs.get("device") is None:
            kwargs = kwargs | {"device": "cuda"}
        return func(*args, **kwargs)


def on_gpu(fn: Callable[..., Any], *args: Any) -> Any:
    """What `fn` returns when all is on a GPU, in host memory."""
    with OnGpu():
        found = fn(*tree_map_only(torch.Tensor, lambda tensor: tensor.cuda(), args))
    return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), found)
