"""The micro-batches of a step, in `.grad` of one rank, where each has a weight of its own: see `weighting`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradsync.engine.bucket import Entry
from gradsync.engine.weighting import Weighting


class MicroBatches:
    """Makes what stands in `.grad` fit to be added to."""

    def __init__(self, entries: Sequence[Entry], weighting: Weighting) -> None:
        self._entries = entries
        self._weighting = weighting
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._weighting.begin()
        self._weighed_at = 0  # backwards of this step when a weight was set last
        self._heavier: list[tuple[Entry, torch.Tensor]] = []  # what is there, while far lighter gradients come apart

    def set_weight(self, weight: float, micro_batches: int, backwards: int) -> None:
        """What comes counts so much; so many micro-batches of the window are done, and backwards of the step."""
        if self._weighting.k == 1:  # under no_sync(): what lies between two calls counts as one
            micro_batches = self._weighting.num_closed + (backwards > self._weighed_at)
        self._weighed_at = backwards
        self._weighting.set(weight, micro_batches)

    @torch.no_grad()
    def weigh(self) -> bool:
        """A backward begins: let what is there have its weight; False if its gradients must come apart."""
        self.merge()
        if self._weighting.comes_apart:
            self._heavier = [(each, each.param.grad) for each in self._entries if each.param.grad is not None]
            for entry, _ in self._heavier:
                entry.param.grad = None
            if self._heavier:
                return False
            self._weighting.base = None  # the loss of what came before touched no parameter
        if (ratio := self._weighting.take_over()) != 1.0:
            for entry in self._entries:
                if entry.param.grad is not None:
                    entry.param.grad = entry.param.grad.mul_(ratio) if ratio else None
        return True

    def nothing_came(self, backwards: int) -> None:
        """A backward brought no gradient; so many did before."""
        self.merge()
        if not backwards:
            self._weighting.base = None

    @torch.no_grad()
    def merge(self) -> None:
        """Add the light gradients that came apart to those that were there."""
        if not self._heavier:
            return
        heavier, self._heavier = {entry.index: grad for entry, grad in self._heavier}, []
        lightness = self._weighting.lightness()
        for entry in self._entries:
            grad, there = entry.param.grad, heavier.get(entry.index)
            if grad is not None:
                grad = grad.mul_(lightness) if lightness else torch.zeros_like(grad)  # 0 · NaN would be NaN
                entry.param.grad = grad if there is None else there + grad
            elif there is not None:
                entry.param.grad = there
