"""One rank's part of the parameters: the masters, what steps them, and their version.

    all parameters, largest first ──▶ the rank with the fewest bytes so far
    rank 0  ▒▒▒▒▒▒▒▒▒▒  embed.weight
    rank 1  ▒▒▒▒▒▒ ▒▒▒  fc.weight, out.weight        whole parameters, so that any optimizer class works
    rank 2  ▒▒▒▒▒ ▒▒▒▒▒ conv.weight, head.weight

The masters lie where the parameters lie; what comes and goes is staged through the host.

A state is flat tensors; the hyper-parameters are in the user's optimizer, and are saved with it:

    version                        how many updates were made
    clock                          of every worker: all stand level when a shard is saved
    master.<parameter>             the parameter
    optimizer.<i>.<parameter>.<k>  tensor k that the i-th optimizer keeps for it
    number.<i>.<parameter>.<k>     the same, for a plain number

Note [One stream]
    The training thread and the receiver thread both work on the masters, in turn, under the owner's lock. On a GPU
    each thread has a current stream of its own, so all of this is issued to the default stream, where the order
    of issue is the order of execution.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from gradsync.errors import GradSyncError
from gradsync.pace.async_sgd.messages import pack
from gradsync.pace.async_sgd.optimizer_copy import OptimizerCopy

State = dict[str, torch.Tensor]
Named = Sequence[tuple[str, torch.nn.Parameter]]


def partition(nbytes: Sequence[int], num_shards: int) -> list[list[int]]:
    """The indices of each shard: balanced by bytes, and the same wherever it is computed.

    >>> partition([10, 60, 30, 25], 2)
    [[1], [0, 2, 3]]
    """
    shards: list[list[int]] = [[] for _ in range(num_shards)]
    filled = [(0, shard) for shard in range(num_shards)]
    for index in sorted(range(len(nbytes)), key=lambda i: (-nbytes[i], i)):
        total, shard = heapq.heappop(filled)
        shards[shard].append(index)
        heapq.heappush(filled, (total + nbytes[index], shard))
    return [sorted(shard) for shard in shards]


class Shard:
    """Masters and optimizer copies; whoever calls holds the owner's lock."""

    def __init__(self, parameters: Named, optimizers: Sequence[Optimizer]) -> None:
        self.names = [name for name, _ in parameters]
        self.masters = [torch.nn.Parameter(p.detach().clone()) for _, p in parameters]
        self._begin([p for _, p in parameters], optimizers)
        self.version = 0  # how many updates were made
        self._devices = {m.device for m in self.masters if m.device.type == "cuda"}
        self._packed: torch.Tensor | None = None

    def _begin(self, parameters: Sequence[torch.nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
        of = dict(zip(parameters, self.masters, strict=True))
        self.optimizer_copies = [OptimizerCopy(optimizer, of) for optimizer in optimizers]

    def restart(self, parameters: Sequence[torch.nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
        """Go on from what these are now, and from the optimizers' state."""
        self.put([p.detach() for p in parameters], self.version)
        self._begin(parameters, optimizers)

    def note(self) -> None:
        """Take over the hyper-parameters of the user's optimizers: see [Noted hyper-parameters]."""
        for optimizer_copy in self.optimizer_copies:
            optimizer_copy.note()

    def update(self, gradients: Sequence[torch.Tensor | None], lr_scale: float = 1.0) -> None:
        """One step of every optimizer; a parameter without a gradient is not used in it."""
        with self._on_one_stream():
            for master, gradient in zip(self.masters, gradients, strict=True):
                master.grad = None if gradient is None else gradient.to(master.device)
            for optimizer_copy in self.optimizer_copies:
                optimizer_copy.step(lr_scale)
            for master in self.masters:
                master.grad = None
        self.version += 1
        self._packed = None

    def packed(self) -> torch.Tensor:
        """The masters as bytes on the host; never written again, so it may be kept and sent."""
        if self._packed is None:
            with self._on_one_stream():
                self._packed = pack(self.masters)
        return self._packed

    def put(self, masters: Sequence[torch.Tensor], version: int) -> None:
        """Go on from here instead."""
        with self._on_one_stream(), torch.no_grad():
            for master, value in zip(self.masters, masters, strict=True):
                master.copy_(value)
        self.version = version
        self._packed = None

    @contextmanager
    def _on_one_stream(self) -> Iterator[None]:
        with ExitStack() as stack:
            for device in self._devices:
                stack.enter_context(torch.cuda.stream(torch.cuda.default_stream(device)))
            yield

    # As flat tensors

    def state(self, clock: int) -> State:
        """Copies of all that it needs to go on."""
        state = {"version": torch.tensor(self.version, device="cpu"), "clock": torch.tensor(clock, device="cpu")}
        for name, master in zip(self.names, self.masters, strict=True):
            state[f"master.{name}"] = master.detach().clone()
            for i, optimizer_copy in enumerate(self.optimizer_copies):
                for key, value in optimizer_copy.state_of(master).items():
                    if isinstance(value, torch.Tensor):
                        state[f"optimizer.{i}.{name}.{key}"] = value.clone()
                    elif value is not None:
                        state[f"number.{i}.{name}.{key}"] = _number(value, key, name)
        return state

    def load(self, state: Mapping[str, torch.Tensor]) -> int:
        """Put back what `state` gave; the clock it was saved at."""
        shapes = {f"master.{name}": master.shape for name, master in zip(self.names, self.masters, strict=True)}
        saved = {key: value.shape for key, value in state.items() if key.startswith("master.")}
        if saved != shapes:
            odd = sorted({key for key, _ in saved.items() ^ shapes.items()})[0].removeprefix("master.")
            raise GradSyncError(
                f"the saved shard is not the one this rank keeps: they differ in {odd!r}. Every rank must load what "
                "the same rank saved, with the same model and equally many ranks"
            )
        self.put([state[f"master.{name}"] for name in self.names], int(state["version"]))
        for name, master in zip(self.names, self.masters, strict=True):
            for i, optimizer_copy in enumerate(self.optimizer_copies):
                optimizer_copy.set_state(master, _optimizer_state(state, f"{i}.{name}.", master.device))
        return int(state["clock"])


def _number(value: object, key: str, name: str) -> torch.Tensor:
    if isinstance(value, bool | int | float):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None, device="cpu")
    raise GradSyncError(
        f"async_sgd cannot save the optimizer's {key!r} of {name!r}: it is a {type(value).__name__}, and only tensors "
        "and numbers are saved. Use an optimizer that keeps those"
    )


def _optimizer_state(state: Mapping[str, torch.Tensor], prefix: str, device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in state.items():
        kind, _, rest = key.partition(".")
        entry = rest.removeprefix(prefix)
        if rest == entry or "." in entry:  # of another parameter, perhaps of one whose name goes on from ours
            continue
        if kind == "number":
            found[entry] = value.item()
        elif kind == "optimizer":  # a count of steps stays where the optimizer had it
            found[entry] = value.to(device, copy=True) if value.dim() else value.clone()
    return found
