"""What a model consists of, for us: its parameters by name, its buffers; and what we must refuse."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gradsync.engine.bucket import Entry
from gradsync.engine.replicas import BufferSite
from gradsync.engine.scripted import buffers_of, parameters_of, refuse_scripted_root
from gradsync.engine.slips import not_a_model, not_an_optimizer
from gradsync.engine.user_hooks import GradientHook

_ATTACHED = "attached already; call detach() on that GradSync"


class Inventory(NamedTuple):
    """The parameters in order of registration, each once, and the buffers."""

    entries: list[Entry]
    buffers: list[BufferSite]
    ignored: set[int]  # ids of what is left alone

    def table(self, optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
        """What ranks compare: one row per parameter and per buffer."""
        places = _places_in(optimizers)
        parameters = [
            _row("parameter", entry.name, entry.param)
            | {
                "requires_grad": entry.param.requires_grad,
                "sparse": entry.sparse,
                "optimizer": ", ".join(places.get(id(entry.param), ["none"])),
            }
            for entry in self.entries
        ]
        return parameters + [_row("buffer", site.name, site.tensor) for site in self.buffers]

    def tensors(self) -> list[torch.Tensor]:
        """All values a replica holds."""
        return [entry.param.detach() for entry in self.entries] + [site.tensor for site in self.buffers]


def take_inventory(model: torch.nn.Module, optimizers: Sequence[Optimizer], ignore: Iterable[Any]) -> Inventory:
    """Look at everything; raise ValueError with the way out where we cannot serve."""
    _refuse_wrappers(model)
    refuse_scripted_root(model)
    ignored = _read_ignore(model, ignore)
    entries: list[Entry] = []
    buffers: list[BufferSite] = []
    seen = set(ignored)
    for prefix, module in model.named_modules():
        sparse = isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
        parameters, module_buffers = parameters_of(module), buffers_of(module)
        for key, param in parameters.items():
            if param is None or id(param) in seen:
                continue
            seen.add(id(param))
            name = clean(f"{prefix}.{key}" if prefix else key)
            _refuse_parameter(name, param)
            entries.append(Entry(len(entries), name, param, parameters, key, sparse))
        for key, buffer in module_buffers.items():
            if buffer is None or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            name = clean(f"{prefix}.{key}" if prefix else key)
            _refuse_buffer(name, buffer)
            buffers.append(BufferSite(name, module_buffers, key))
    if not any(entry.param.requires_grad for entry in entries):
        raise ValueError(
            "the model has no parameter that requires a gradient, so there is nothing to synchronize; "
            "attach after parameters are made and unfrozen"
        )
    _refuse_optimizers(entries, optimizers, ignored)
    return Inventory(entries, buffers, ignored)


def check_ignore(ignore: object) -> None:
    """Refuse one name or tensor without a list around it: both could be iterated over, into letters and rows."""
    if isinstance(ignore, str):
        raise TypeError(f"ignore takes a list of names or tensors, got the string {ignore!r}")
    if isinstance(ignore, torch.Tensor) or not isinstance(ignore, Iterable):
        what = f"a tensor of shape {list(ignore.shape)}" if isinstance(ignore, torch.Tensor) else repr(ignore)
        raise TypeError(f"ignore takes a list of names or tensors, got {what}: put it into a list")


def _read_ignore(model: torch.nn.Module, ignore: Iterable[Any]) -> set[int]:
    """The ids of what to leave alone; a tensor with several names goes by any of them."""
    check_ignore(ignore)
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    named = {clean(name): tensor for name, tensor in every}
    of_the_model = {id(tensor) for _, tensor in every}
    ignored: set[int] = set()
    for each in ignore:
        if isinstance(each, torch.Tensor):
            if id(each) not in of_the_model:
                raise ValueError(
                    f"ignore holds a tensor of shape {tuple(each.shape)}, which is none of the model's; "
                    "pass the parameter or buffer itself, no copy of it, or its name"
                )
            ignored.add(id(each))
        elif not isinstance(each, str):
            raise TypeError(f"ignore takes names or tensors, got {each!r}")
        elif clean(each) in named:
            ignored.add(id(named[clean(each)]))
        else:
            raise ValueError(
                f"ignore names {each!r}, which the model does not have; "
                "names are those of model.named_parameters() and model.named_buffers()"
            )
    return ignored


def _row(kind: str, name: str, tensor: torch.Tensor) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"kind": kind, "name": name, "shape": list(tensor.shape), "dtype": dtype, "device": tensor.device.type}


def clean(name: str) -> str:
    """The name without what torch.compile puts in front of a block's own.

    >>> clean("_orig_mod.blocks.0._orig_mod.weight")
    'blocks.0.weight'
    """
    return name.replace("_orig_mod.", "")


def _refuse_wrappers(model: torch.nn.Module) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(not_a_model(model))
    for name, module in model.named_modules():
        where = f"its module {name!r}" if name else "the model"
        if isinstance(module, DistributedDataParallel):
            raise ValueError(
                f"{where} is under DistributedDataParallel, which averages gradients itself; "
                "pass the model that you gave to it (ddp.module) and drop the wrapper"
            )
        if _is_of(module, "torch.distributed.fsdp", "FullyShardedDataParallel"):
            raise ValueError(
                f"{where} is under FSDP, which shards parameters; gradsync serves replicas that hold the whole model"
            )


def _refuse_form(what: str, tensor: torch.Tensor) -> None:
    if _is_of(tensor, "torch.distributed.tensor", "DTensor"):
        raise ValueError(
            f"{what} is a DTensor (FSDP2 or tensor parallelism); gradsync serves replicas that hold the "
            "whole model: attach before fully_shard is not possible, use its own replication instead"
        )
    if is_lazy(tensor):
        raise ValueError(f"{what} is lazy and has no shape yet; run one forward before attach")
    if tensor.device.type == "meta":
        raise ValueError(f"{what} is on the meta device; call model.to_empty(device=...) and load it first")


def _refuse_buffer(name: str, buffer: torch.Tensor) -> None:
    _refuse_form(f"buffer {name}", buffer)
    if buffer.layout != torch.strided:
        raise ValueError(f"buffer {name} is {buffer.layout}, which cannot be broadcast; name it in ignore=[...]")
    if any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)):
        raise ValueError(
            f"buffer {name} is an expanded tensor whose elements share memory, so it cannot be written; "
            "register its clone(), or name it in ignore=[...]"
        )


def _refuse_parameter(name: str, param: torch.Tensor) -> None:
    _refuse_form(f"parameter {name}", param)
    for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
        if isinstance(hook, GradientHook):
            whose = "observed already; call close() on its observer" if hook.observes else _ATTACHED
            raise ValueError(f"parameter {name} is {whose} first")


def _refuse_optimizers(entries: list[Entry], optimizers: Sequence[Optimizer], ignored: set[int]) -> None:
    known = {id(entry.param) for entry in entries} | ignored
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(not_an_optimizer(optimizer))
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in known:
                    raise ValueError(
                        f"{type(optimizer).__name__} holds a parameter of shape {tuple(param.shape)} that the model "
                        "does not have; make the optimizer from this model's parameters, after any change to them, or, "
                        "if it trains several models, attach each of them without it: gs.attach(model)"
                    )


def _places_in(optimizers: Sequence[Optimizer]) -> dict[int, list[str]]:
    """Where each parameter stands: in which optimizer, in which of its groups, at which place."""
    places: dict[int, list[str]] = {}
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for k, param in enumerate(group["params"]):
                places.setdefault(id(param), []).append(f"{i} ({type(optimizer).__name__}) group {j} place {k}")
    return places


def _is_of(value: object, module: str, name: str) -> bool:
    """Whether it is of that class. Nothing is, before somebody imported it; and importing it takes a second."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)
