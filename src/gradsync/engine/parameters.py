"""The parts of a model that matter here: its parameters by name, its buffers; and what we must refuse.

Notice what changed in a model after attach: a parameter nobody averages would let replicas drift apart.

Looked at before every forward, so only identities and counts are compared, no names are built.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Sized
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gradsync.engine.argument_hints import not_a_model, not_an_optimizer
from gradsync.engine.bucket import GradEntry
from gradsync.engine.jit_modules import buffers_of, children_of, parameters_of, refuse_scripted_root
from gradsync.engine.replicas import BufferSite
from gradsync.engine.user_hooks import GradientHook
from gradsync.errors import GradSyncError

M = TypeVar("M")

_ATTACHED = "attached already; call detach() on that GradSync"
# Those that a rank has attached which is alone and needs no hooks, by id: nothing on them would tell.
_unhooked: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


class Inventory(NamedTuple):
    """The parameters in order of registration, each once, and the buffers."""

    entries: list[GradEntry]
    buffers: list[BufferSite]
    ignored: set[int]  # ids of what is left alone

    def table(self, optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
        """Return what ranks compare: one row per parameter and per buffer."""
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
        """Return all values a replica holds."""
        return [entry.param.detach() for entry in self.entries] + [site.tensor for site in self.buffers]


def unseen(table: Mapping[str, M | None], seen: set[int]) -> Iterator[tuple[str, M]]:
    """Yield what a module has and none before it had."""
    for key, member in table.items():
        if member is not None and id(member) not in seen:
            seen.add(id(member))
            yield key, member


def take_inventory(model: torch.nn.Module, optimizers: Sequence[Optimizer], ignore: Iterable[Any]) -> Inventory:
    """Look at everything; raise ValueError with the way out where we cannot serve."""
    _refuse_wrappers(model)
    refuse_scripted_root(model)
    ignored = _read_ignore(model, ignore)
    entries: list[GradEntry] = []
    buffers: list[BufferSite] = []
    seen = set(ignored)
    for prefix, module in model.named_modules():
        sparse = isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
        parameters, module_buffers = parameters_of(module), buffers_of(module)
        for key, param in unseen(parameters, seen):
            name = clean(f"{prefix}.{key}" if prefix else key)
            _refuse_parameter(name, param)
            entries.append(GradEntry(len(entries), name, param, parameters, key, sparse))
        for key, buffer in unseen(module_buffers, seen):
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
    if _unhooked.get(id(param)) is param:
        raise ValueError(f"parameter {name} is {_ATTACHED} first")
    for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
        if isinstance(hook, GradientHook):
            whose = "observed already; call close() on its observer" if hook.observes else _ATTACHED
            raise ValueError(f"parameter {name} is {whose} first")


def note_unhooked(entries: Iterable[GradEntry], attached: bool) -> None:
    """Note that these are attached without a hook, or no more; a second attach recognizes those that have one by it."""
    for entry in entries:
        _unhooked.pop(id(entry.param), None)
        if attached and entry.param.requires_grad:
            _unhooked[id(entry.param)] = entry.param


def _refuse_optimizers(entries: list[GradEntry], optimizers: Sequence[Optimizer], ignored: set[int]) -> None:
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
    """Return where each parameter stands: in which optimizer, in which of its groups, at which place."""
    places: dict[int, list[str]] = {}
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for k, param in enumerate(group["params"]):
                places.setdefault(id(param), []).append(f"{i} ({type(optimizer).__name__}) group {j} place {k}")
    return places


def _is_of(value: object, module: str, name: str) -> bool:
    """Return whether it is of that class. Nothing is, before somebody imported it; and importing it takes a second."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


class ModelChanges:
    """The changes in a model since attach, by what it consisted of then."""

    def __init__(
        self,
        model: torch.nn.Module,
        entries: list[GradEntry],
        ignored: set[int],
        buffers: bool = True,
        place: Callable[[], str] = str,
    ) -> None:
        """`buffers`: whether the model's buffers are to be kept equal; `place` is where this rank is, for errors."""
        self._entries = entries
        self._keeps_buffers = buffers
        self._buffers: set[str] | None = None  # their names, once noted
        self._place = place
        self._known = {id(entry.param) for entry in entries} | ignored
        self._model = weakref.ref(model)
        self._note_modules(model)
        self.note_trainable()
        self._forms = [(entry, entry.param.dtype, entry.param.device) for entry in (entries[0], entries[-1])]

    def check_model(self) -> None:
        """Raise if a parameter was replaced, added or converted.

        A tensor in a parameter's place that is none itself is `torch.func.functional_call` at work: it puts
        the parameter back.
        """
        for entry in self._entries:
            there = entry.owner.get(entry.key)
            if there is not entry.param and (there is None or isinstance(there, torch.nn.Parameter)):
                self._look_again(entry.name)
        for modules, key, child in self._children:
            if modules.get(key) is not child:
                self._look_again(key)
        for table, count in self._counts:
            if len(table) != count:
                self._look_again("the model")
        for buffers, key in self._vacant:
            if buffers.get(key) is not None:
                self._look_again("the model")
        for entry, dtype, device in self._forms:
            if entry.param.dtype != dtype or entry.param.device != device:
                now = f"{entry.param.dtype} on {entry.param.device}"
                self._raise(f"parameter {entry.name} was {dtype} on {device} at attach and is {now} now")

    def _look_again(self, where: str) -> None:
        """Something is not where it was: raise what became of it. Modules without parameters may come and go."""
        model = self._model()
        assert model is not None
        names = {id(param): clean(name) for name, param in model.named_parameters()}
        new = [name for key, name in names.items() if key not in self._known]
        gone = [entry.name for entry in self._entries if id(entry.param) not in names]
        renamed = [(e.name, names[id(e.param)]) for e in self._entries if names.get(id(e.param), e.name) != e.name]
        if gone and new:
            self._raise(f"{_several(gone)} replaced after attach by {', '.join(new[:3])}, which nobody averages")
        if new:
            self._raise(f"{_several(new)} added after attach, and nobody averages what came later")
        if gone:
            self._raise(f"{_several(gone)} taken out of the model after attach")
        if renamed:
            before, now = renamed[0]
            self._raise(
                f"parameter {before} is called {now} since attach, as pruning, parametrizations and wrappers rename: "
                "checkpoints would not find it, and buffers that came with it would not be kept equal"
            )
        if any(entry.owner.get(entry.key) is not entry.param for entry in self._entries):
            self._raise(f"{where} holds other modules since attach")
        self._note_modules(model)

    def _note_modules(self, model: torch.nn.Module) -> None:
        """Note its modules of now."""
        modules = list(model.modules())
        self._children = [(table, key, child) for table in map(children_of, modules) for key, child in table.items()]
        self._counts: list[tuple[Sized, int]] = [
            (table, len(table)) for m in modules for table in (parameters_of(m), children_of(m))
        ]
        self._vacant: list[tuple[MutableMapping[str, torch.Tensor | None], str]] = []
        if self._keeps_buffers:
            tables = [buffers_of(m) for m in modules]
            self._counts += [(table, len(table)) for table in tables]
            self._vacant = [(table, key) for table in tables for key, value in table.items() if value is None]
            self._note_buffers({clean(name) for name, _ in model.named_buffers(remove_duplicate=False)})

    def _note_buffers(self, names: set[str]) -> None:
        """Note its buffers of now; what came later is each rank's own, which may be meant: said, and no error."""
        late = sorted(names - self._buffers) if self._buffers is not None else []
        self._buffers = names
        if late:
            warnings.warn(
                f"{self._place()} {_several(late, 'buffer')} added after attach: each rank keeps its own, while those "
                "of before are rank 0's on every rank. If they have to be equal, attach once they are there; if none "
                'has to, gs.attach(..., buffers="none")',
                stacklevel=6,
            )

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise if the optimizer is about to apply a gradient that nobody averaged."""
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in self._known and param.grad is not None:
                    shape = tuple(param.shape)
                    self._raise(f"{type(optimizer).__name__} got a parameter of shape {shape} after attach")

    def check_assigned(self) -> None:
        """Raise if the optimizer is about to apply a gradient of `torch.autograd.grad` that the user has assigned."""
        for entry in self._entries:
            if entry.param.grad is not None and entry.param.grad.requires_grad:
                raise GradSyncError(
                    f"{self._place()} the .grad of parameter {entry.name} was assigned, with its graph, and no "
                    "backward has brought it, so nobody averages it: call backward() on the loss, or average each "
                    "yourself, param.grad = gs.all_reduce(grad.detach())"
                )

    def note_trainable(self) -> None:
        """Note which parameters require a gradient now."""
        self._trainable = [entry.param.requires_grad for entry in self._entries]

    def trainable_changed(self) -> bool:
        """Return whether one was frozen or thawed since."""
        return [entry.param.requires_grad for entry in self._entries] != self._trainable

    def check_thawed(self, hears: Callable[[GradEntry], bool]) -> None:
        """Raise if a thawed parameter has a gradient that nobody heard of."""
        for entry, before in zip(self._entries, self._trainable, strict=True):
            if entry.param.requires_grad and not before and entry.param.grad is not None and not hears(entry):
                raise GradSyncError(
                    f"{self._place()} parameter {entry.name} was thawed and used before gradsync noticed, so its "
                    "gradient is not averaged; call the model itself, not its parts, in the first step after"
                )

    def _raise(self, what: str) -> NoReturn:
        raise GradSyncError(
            f"{self._place()} {what}; call sync.detach() before you change the model, and attach again after"
        )


def _several(names: list[str], what: str = "parameter") -> str:
    """
    >>> _several(["a.weight"]), _several(["a.weight", "a.bias", "b.weight", "b.bias"])
    ('parameter a.weight was', 'parameters a.weight, a.bias, b.weight and 1 more were')
    """
    if len(names) == 1:
        return f"{what} {names[0]} was"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what}s {', '.join(names[:3])}{more} were"
