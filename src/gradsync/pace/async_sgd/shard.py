"""One rank's part of the parameters: the masters, what steps them, and their version.

    all parameters, largest first ──▶ the rank with the fewest bytes so far
    rank 0  ▒▒▒▒▒▒▒▒▒▒  embed.weight
    rank 1  ▒▒▒▒▒▒ ▒▒▒  fc.weight, out.weight        whole parameters, so that any optimizer class works
    rank 2  ▒▒▒▒▒ ▒▒▒▒▒ conv.weight, head.weight

The masters lie where the parameters lie; what comes and goes is staged through the host.

Note [One stream]
    The training thread and the receiver thread both work on the masters, in turn, under the owner's lock. On a GPU
    each thread has a current stream of its own, so all of this is issued to the default stream, where the order
    of issue is the order of execution.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch.optim import Optimizer

from gradsync.pace.async_sgd.messages import pack
from gradsync.pace.async_sgd.optimizer_copy import OptimizerCopy

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
