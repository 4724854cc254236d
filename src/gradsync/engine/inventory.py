"""What a model consists of, for us: its parameters by name, its buffers; and what we must refuse."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gradsync.engine.bucket import Entry
from gradsync.engine.hooks import GradientHook


class Inventory(NamedTuple):
    """The parameters in order of registration, each once, and the buffers."""

    entries: list[Entry]
    buffers: list[torch.Tensor]

    def table(self, optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
        """What ranks compare: one row per parameter."""
        groups = _groups_of(optimizers)
        return [
            {
                "name": entry.name,
                "shape": list(entry.param.shape),
                "dtype": str(entry.param.dtype).removeprefix("torch."),
                "requires_grad": entry.param.requires_grad,
                "device": entry.param.device.type,
                "sparse": entry.sparse,
                "optimizer": groups.get(id(entry.param), []),
            }
            for entry in self.entries
        ]


def take_inventory(model: torch.nn.Module, optimizers: Sequence[Optimizer], ignore: Iterable[Any]) -> Inventory:
    """Look at everything; raise ValueError with the way out where we cannot serve."""
    _refuse_wrappers(model)
    ignored = list(ignore)
    names = {name for name in ignored if isinstance(name, str)}
    tensors = {id(tensor) for tensor in ignored if isinstance(tensor, torch.Tensor)}
    entries: list[Entry] = []
    buffers: list[torch.Tensor] = []
    seen: set[int] = set()
    found: set[str] = set()
    for prefix, module in model.named_modules():
        sparse = isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
        for key, param in module._parameters.items():
            name = _clean(f"{prefix}.{key}" if prefix else key)
            found.add(name)
            if param is None or id(param) in seen or name in names or id(param) in tensors:
                continue
            seen.add(id(param))
            _refuse_parameter(name, param)
            entries.append(Entry(len(entries), name, param, module._parameters, key, sparse))
        for key, buffer in module._buffers.items():
            name = _clean(f"{prefix}.{key}" if prefix else key)
            found.add(name)
            if buffer is not None and id(buffer) not in seen and name not in names and id(buffer) not in tensors:
                seen.add(id(buffer))
                buffers.append(buffer)
    if unknown := names - found:
        raise ValueError(f"ignore names {sorted(unknown)}, which the model does not have")
    if not any(entry.param.requires_grad for entry in entries):
        raise ValueError("the model has no parameter that requires a gradient, so there is nothing to synchronize")
    _refuse_optimizers(entries, optimizers, tensors)
    return Inventory(entries, buffers)


def _clean(name: str) -> str:
    """The name without what torch.compile puts in front of a block's own.

    >>> _clean("_orig_mod.blocks.0._orig_mod.weight")
    'blocks.0.weight'
    """
    return name.replace("_orig_mod.", "")


def _refuse_wrappers(model: torch.nn.Module) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"attach takes a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        where = f"its module {name!r}" if name else "the model"
        if isinstance(module, DistributedDataParallel):
            raise ValueError(
                f"{where} is under DistributedDataParallel, which averages gradients itself; "
                "pass the model that you gave to it (ddp.module) and drop the wrapper"
            )
        if isinstance(module, FullyShardedDataParallel):
            raise ValueError(
                f"{where} is under FSDP, which shards parameters; gradsync serves replicas that hold the whole model"
            )


def _refuse_parameter(name: str, param: torch.Tensor) -> None:
    if isinstance(param, DTensor):
        raise ValueError(
            f"parameter {name} is a DTensor (FSDP2 or tensor parallelism); gradsync serves replicas that hold the "
            "whole model: attach before fully_shard is not possible, use its own replication instead"
        )
    if is_lazy(param):
        raise ValueError(f"parameter {name} is lazy and has no shape yet; run one forward before attach")
    if param.device.type == "meta":
        raise ValueError(f"parameter {name} is on the meta device; call model.to_empty(device=...) and load it first")
    for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
        if isinstance(hook, GradientHook):
            raise ValueError(f"parameter {name} is attached already; call detach() on that GradSync first")
        raise ValueError(
            f"parameter {name} has a post-accumulate hook of its own ({hook!r}), which would see the gradient "
            "before it is averaged; remove it, and attach it after backward() or in an optimizer hook instead"
        )


def _refuse_optimizers(entries: list[Entry], optimizers: Sequence[Optimizer], ignored: set[int]) -> None:
    known = {id(entry.param) for entry in entries} | ignored
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"attach takes torch optimizers, got {type(optimizer).__name__}")
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in known:
                    raise ValueError(
                        f"{type(optimizer).__name__} holds a parameter of shape {tuple(param.shape)} that the model "
                        "does not have; make the optimizer from this model's parameters, after any change to them"
                    )


def _groups_of(optimizers: Sequence[Optimizer]) -> dict[int, list[list[int]]]:
    """Which optimizer and which of its groups hold each parameter."""
    groups: dict[int, list[list[int]]] = {}
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                groups.setdefault(id(param), []).append([i, j])
    return groups
