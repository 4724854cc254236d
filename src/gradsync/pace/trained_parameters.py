"""Which parameters travel where parameters do: those that required a gradient at attach. Nobody changes the others.

Means of tensors that travel seldom, so that they have no memory to travel in: exact, by way of flat copies.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch

from gradsync.errors import GradSyncError
from gradsync.exchange.choose_route import Exact
from gradsync.pace.contract import Site, State
from gradsync.transport.lane import Lane


def average(lane: Lane, exact: Exact, tensors: Sequence[torch.Tensor]) -> None:
    """Make each its mean over the ranks, in place; every rank calls this at once."""
    for alike, flat in _flat(tensors):
        lane.wait(exact.launch(flat.div_(lane.groups.size)))
        _unflatten(flat, alike)


def level(lane: Lane, exact: Exact, tensors: Sequence[torch.Tensor]) -> None:
    """The same, and bit for bit what it was where the ranks had equal values: a third three times may be less than one.

    mean = a + Σ (b − a) / n        b each rank's own, a that of the group's first
    """
    for alike, flat in _flat(tensors):
        first = flat.clone() if lane.groups.rank == 0 else torch.zeros_like(flat)
        lane.wait(exact.launch(first))
        gap = flat.sub_(first).div_(lane.groups.size)
        lane.wait(exact.launch(gap))
        _unflatten(first.add_(gap), alike)


def _flat(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
    """Those of one dtype and device, and a copy of them in one piece."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for alike in kinds.values():
        yield alike, torch.cat([tensor.flatten() for tensor in alike])


def _unflatten(flat: torch.Tensor, alike: list[torch.Tensor]) -> None:
    for tensor, part in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
        tensor.copy_(part.view_as(tensor))


class Trained:
    """The trained parameters by name, and a look at those that are not to become one."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._lane = site.lane
        self.named = [(name, param) for name, param in site.parameters if param.requires_grad]
        self.params = [param for _, param in self.named]
        self._frozen = [(name, param) for name, param in site.parameters if not param.requires_grad]

    def check(self) -> None:
        """Raise if one was thawed: it would change here, and never travel."""
        for name, param in self._frozen:
            if param.requires_grad:
                raise GradSyncError(
                    f"{self._lane.place()} parameter {name} was frozen at attach and requires a gradient now, so it "
                    "would not be averaged; call sync.detach() before you thaw it, and attach again after"
                )

    def drop_gradients(self) -> None:
        """The next step applies nothing."""
        for param in self.params:
            param.grad = None

    def level(self) -> None:
        """Make them equal on all ranks: their mean. Every rank calls this at once."""
        level(self._site.lane, self._site.exact, self.params)

    def warn_of_another(self, kind: str, shared: State) -> None:
        """This state is of such a pace, but not of these parameters. That it is of another pace, the engine says."""
        if any(key.startswith(f"{kind}.") for key in shared) and self._lane.groups.rank == 0:
            warnings.warn(
                f"{self._lane.place()} this state was saved with other parameters frozen: {kind} begins anew, from the "
                "mean of the ranks' parameters",
                stacklevel=6,
            )
