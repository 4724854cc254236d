"""Whole state from one rank to all: parameters and buffers at attach, buffers with every step, optimizers.

Tensors travel as raw bytes, small ones packed per device, so one broadcast serves every dtype; large ones from and to
where they lie, for memory is slow when it is new. What is not a tensor (learning rates, step counts) travels as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, MutableMapping
from typing import Any, NamedTuple

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradsync.agreement.documents import Document, agree, majority
from gradsync.engine.bucket import GradEntry
from gradsync.errors import GradSyncError
from gradsync.transport.lane import Lane
from gradsync.transport.pending import Pending

_CHUNK_NBYTES = 16 << 20


def broadcast_tensors(lane: Lane, tensors: Iterable[torch.Tensor], source: int, what: str) -> None:
    """Make every rank's tensors those of rank `source` (an index in the group), in place."""
    chunks: dict[str, list[list[torch.Tensor]]] = {}
    filled: dict[str, int] = {}
    for tensor in tensors:
        kind = tensor.device.type
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes > _CHUNK_NBYTES:
            _broadcast_large(lane, tensor, source, what)
            continue
        if kind not in chunks or filled[kind] + nbytes > _CHUNK_NBYTES:
            chunks.setdefault(kind, []).append([])
            filled[kind] = 0
        chunks[kind][-1].append(tensor)
        filled[kind] += nbytes
    for batch in (batch for batches in chunks.values() for batch in batches):
        flat, pending = _launch_broadcast(lane, batch, source, what)
        lane.wait(pending)
        _unpack(flat, batch)


def _broadcast_large(lane: Lane, tensor: torch.Tensor, source: int, what: str) -> None:
    """Broadcast in pieces, in place where its elements lie in order; on which ranks they do, nobody needs to know."""
    flat = _bytes_of(tensor)
    for pending in [_launch(lane, piece, source, what) for piece in flat.split(_CHUNK_NBYTES)]:
        lane.wait(pending)
    if flat.data_ptr() != tensor.data_ptr():
        _unpack(flat, [tensor])


class BufferSite(NamedTuple):
    """The place where a buffer lives: forward may put another tensor there (`self.count = self.count + 1`)."""

    name: str
    owner: MutableMapping[str, torch.Tensor | None]
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        tensor = self.owner.get(self.key)
        if tensor is None:
            raise GradSyncError(
                f"buffer {self.name} was there at attach and is None now; name it in attach(ignore=...), or "
                'use buffers="none"'
            )
        return tensor


class Buffers:
    """The model's buffers: the source's values go to all ranks with every synchronization."""

    def __init__(self, sites: list[BufferSite], kept: bool = True) -> None:
        """`kept`: whether they are to be equal."""
        self.kept = kept
        self._sites = sites if kept else []
        self.any = bool(self._sites)
        self._forms = [_form(site.tensor) for site in self._sites]
        self._under_way: list[tuple[torch.Tensor, Pending, list[torch.Tensor]]] = []

    def tensors(self) -> list[torch.Tensor]:
        """The buffers as they are now; of the form that the ranks agreed on, or an error."""
        tensors = [site.tensor for site in self._sites]
        for site, tensor, form in zip(self._sites, tensors, self._forms, strict=True):
            if _form(tensor) != form:
                raise GradSyncError(
                    f"buffer {site.name} was {form} at attach and is {_form(tensor)} now; "
                    'keep its form, name it in attach(ignore=...), or use buffers="none"'
                )
        return tensors

    def launch(self, lane: Lane, source: int) -> None:
        by_device: dict[str, list[torch.Tensor]] = {}
        for tensor in self.tensors():
            by_device.setdefault(tensor.device.type, []).append(tensor)
        for tensors in by_device.values():
            flat, pending = _launch_broadcast(lane, tensors, source, "the model's buffers")
            self._under_way.append((flat, pending, tensors))

    def finish(self, lane: Lane) -> None:
        for flat, pending, tensors in self._under_way:
            lane.wait(pending)
            _unpack(flat, tensors)
        self._under_way = []


def broadcast_optimizer(lane: Lane, optimizer: Optimizer, entries: Iterable[GradEntry], source: int) -> list[str]:
    """Make hyper-parameters, and state of these parameters, those of rank `source`; return what differed in value.

    State that only the source has (it alone loaded a checkpoint) is created on the others. That of parameters which
    are left alone is each rank's own, as they are.
    """
    ours = {id(entry.param) for entry in entries}
    parameters = [p for group in optimizer.param_groups for p in group["params"] if id(p) in ours]
    agree(lane, {"groups": [len(group["params"]) for group in optimizer.param_groups]}, _explain_groups)
    mine = {
        "groups": _hyper_parameters(optimizer),
        "state": [_describe(optimizer.state.get(p, {})) for p in parameters],
    }
    theirs = json.loads(_broadcast_text(lane, json.dumps(mine), source))
    _refuse_what_cannot_travel(optimizer, theirs["state"])
    differing = []
    for group, values in zip(optimizer.param_groups, theirs["groups"], strict=True):
        for key, value in values.items():
            if key not in group or _plain(group[key]) != value:
                differing.append(key)
                _assign(group, key, value)
    tensors = []
    for parameter, described in zip(parameters, theirs["state"], strict=True):
        if lane.groups.rank != source:
            _shape_state(optimizer, parameter, described)
        if described:
            state = optimizer.state[parameter]
            tensors += [state[key] for key, (kind, *_) in described.items() if kind == "tensor"]
    broadcast_tensors(lane, tensors, source, "the optimizer's state")
    return sorted(set(differing))


def broadcast_scaler(lane: Lane, scaler: GradScaler | None, source: int) -> None:
    """Make the loss scale that of rank `source`, where both have one; every rank calls this."""
    mine = None if scaler is None else scaler.state_dict()
    theirs = json.loads(_broadcast_text(lane, json.dumps(mine), source, "the loss scale"))
    if scaler is not None and theirs and lane.groups.rank != source:
        scaler.load_state_dict(theirs)


def _launch_broadcast(lane: Lane, tensors: list[torch.Tensor], source: int, what: str) -> tuple[torch.Tensor, Pending]:
    flat = torch.cat([_bytes_of(tensor) for tensor in tensors])
    return flat, _launch(lane, flat, source, what)


def _launch(lane: Lane, flat: torch.Tensor, source: int, what: str) -> Pending:
    data = lane.groups.data.get(flat.device.type)
    # Gloo: not on the channel for data, where a thread of the exchange may be launching at the same time.
    channel = lane.groups.control if data is None or data.on_host else data
    return lane.launch(lambda: channel.broadcast(flat, source), what, flat.numel())


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device.type}"


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _unpack(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    at = 0
    with torch.no_grad():
        for tensor in tensors:
            nbytes = tensor.numel() * tensor.element_size()
            piece = flat[at : at + nbytes]
            if at % tensor.element_size():  # such a slice cannot be viewed as a wider type
                piece = piece.clone()
            # `.data`: a buffer may be saved for a backward still to come, which must not see it as modified.
            tensor.data.copy_(piece.view(tensor.dtype).view(tensor.shape))
            at += nbytes


def _broadcast_text(lane: Lane, text: str, source: int, what: str = "the optimizer's hyper-parameters") -> str:
    data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    length = torch.tensor([data.numel()], device="cpu")
    control = lane.groups.control
    lane.run(lambda: control.broadcast(length, source), what)
    received = data if lane.groups.rank == source else torch.empty(int(length), dtype=torch.uint8, device="cpu")
    lane.run(lambda: control.broadcast(received, source), what)
    return bytes(received.numpy()).decode()


def _hyper_parameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {key: _plain(value) for key, value in group.items() if key != "params" and _is_plain(value)}
        for group in optimizer.param_groups
    ]


def _is_plain(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _assign(group: dict[str, Any], key: str, value: Any) -> None:
    current = group.get(key)
    if isinstance(current, torch.Tensor):
        current.fill_(value)
    else:
        group[key] = tuple(value) if isinstance(current, tuple) else value


def _describe(state: dict[str, Any]) -> dict[str, Any]:
    """The form of one parameter's state: tensors by dtype, shape and device, the rest by value."""
    described: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            described[key] = (
                "tensor",
                str(value.dtype).removeprefix("torch."),
                list(value.shape),
                value.device.type,
            )
        elif _is_plain(value):
            described[key] = ("value", _plain(value))
        else:
            described[key] = ("other", type(value).__name__)
    return described


def _explain_groups(documents: list[Document], ranks: list[int]) -> str:
    sizes, those, others, these = majority([document["groups"] for document in documents], ranks)
    return (
        f"an optimizer has groups of {sizes} parameters on {those} but of {others} on {these}; "
        "make the same optimizers with the same groups on every rank"
    )


def _refuse_what_cannot_travel(optimizer: Optimizer, states: list[dict[str, Any]]) -> None:
    """Every rank sees the source's description, so every rank raises."""
    for described in states:
        for key, (kind, *rest) in described.items():
            if kind == "other":
                raise ValueError(
                    f"the state {key!r} of {type(optimizer).__name__} is a {rest[0]}, which cannot be sent to other "
                    "ranks; attach before its first step, or load it on every rank and do not pass it to attach"
                )


def _shape_state(optimizer: Optimizer, parameter: torch.Tensor, described: dict[str, Any]) -> None:
    """Give `parameter` a state of the described form, keeping tensors that fit already."""
    if not described:
        optimizer.state.pop(parameter, None)
        return
    state = optimizer.state[parameter]
    for key in [key for key in state if key not in described]:
        del state[key]
    for key, (kind, *rest) in described.items():
        if kind == "value":
            state[key] = rest[0]
            continue
        dtype, shape, device = getattr(torch, rest[0]), tuple(rest[1]), rest[2]
        current = state.get(key)
        if not isinstance(current, torch.Tensor) or (current.shape, current.dtype, current.device.type) != (
            shape,
            dtype,
            device,
        ):
            where = parameter.device if device == parameter.device.type else torch.device(device)
            # With the parameter's strides where it has its shape: a fused optimizer needs them alike.
            state[key] = (
                torch.zeros_like(parameter, dtype=dtype, device=where, requires_grad=False)
                if parameter.shape == shape
                else torch.zeros(shape, dtype=dtype, device=where)
            )
