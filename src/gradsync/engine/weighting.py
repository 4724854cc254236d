"""The weight of each rank's gradient: what a bucket carries, and what its sum is multiplied by. Pure.

With n ranks, k micro-batches in a window, weights w and j micro-batches done:

    a rank's bucket carries   w·g / (n·k·u)
    the sum is multiplied by  n·k·u / Σ w·j

u is a power of two near the mean weight of the last step, so that w·g does not overflow in a half type.
With equal weights and full windows the second line is 1, nothing is multiplied, and the bits are DDP's.

Micro-batches of one rank may weigh differently: then Σ w·g takes the place of w·g, and Σ w that of w·j. Gradients
add up in `.grad` without weights, so what is there counts with the *base*, the weight of what came last:

    weight 3    .grad = g1              base 3
    weight 5    .grad = g1·3/5 + g2     base 5    multiplied before the backward, so buckets still leave during it
    weight 0    .grad = g1·3/5 + g2     base 5    far lighter than the base: kept aside, and added afterwards

"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from gradsync.agreement.header import Flag, Headers
from gradsync.engine.bucket import GradEntry
from gradsync.exchange.means import mean_scale
from gradsync.plan.sync_plan import Combine

_LIGHT = 2.0**-6  # of the base: multiplying by more than the inverse could overflow a half type


class Weighting:
    """This rank's weight in the step under way, and the arithmetic around it."""

    def __init__(self, size: int, k: int, combine: Combine) -> None:
        self._size = size
        self.k = k
        self.combine = combine
        self.unit = 1.0  # agreed: follows from the last header
        self._used_unit = 1.0  # the one in this step's buckets
        self._plain_scale = mean_scale(size * k, combine)  # with no weights
        self.begin()

    def begin(self) -> None:
        """A step begins: nothing has a weight yet."""
        self.weight: float | None = None  # None: the user said nothing
        self.base: float | None = None  # by which what stands in `.grad` counts; None: nothing of this step does
        self.closed = 0.0  # weight of the micro-batches before the weight was set last
        self.num_closed = 0  # how many those are

    def set(self, weight: float, num_done: int) -> None:
        """Micro-batches after the first `num_done` of this step have this weight, each."""
        self.closed += self._now * (num_done - self.num_closed)
        self.num_closed = num_done
        self.weight = weight

    def state(self) -> tuple[float, ...]:
        """The weight, the base, and what is closed; NaN where there is none."""
        numbers = (self.weight, self.base, self.closed, float(self.num_closed))
        return tuple(math.nan if number is None else number for number in numbers)

    def load(self, state: tuple[float, ...] | None) -> None:
        """Go on with a state; None: with nothing. States of before have the weight alone."""
        self.begin()
        if state:
            weight, base, closed, num_closed = state if len(state) == 4 else (state[0], state[0], 0.0, 0.0)
            self.weight, self.base = (None if math.isnan(number) else number for number in (weight, base))
            self.closed, self.num_closed = closed, int(num_closed)

    def continue_from(self, other: Weighting) -> None:
        """Take the place of one that had another plan."""
        self.unit, self.weight = other.unit, other.weight

    def continue_at(self, unit: float, state: tuple[float, ...] | None) -> None:
        """Take the weight from a state that was saved."""
        self.unit = unit
        self.load(state)

    def nothing_there(self) -> None:
        """Nothing of this step stands in `.grad`."""
        self.base = None

    @property
    def changes(self) -> bool:
        """True if what comes has another weight than what is there."""
        return self.base is not None and self.base != self._now

    @property
    def comes_apart(self) -> bool:
        """True if what comes is too light to take over the base."""
        return self.base is not None and self._now < self.base * _LIGHT

    def take_over(self) -> float:
        """Make the weight of what comes the base; what is there is to be multiplied by the result."""
        base, self.base = self.base, self._now
        return 1.0 if base is None or base == self._now else base / self._now

    def lightness(self) -> float:
        """Return what a gradient that was kept aside is multiplied by before it is added."""
        assert self.base is not None
        return self._now / self.base

    @property
    def _now(self) -> float:
        return 1.0 if self.weight is None else self.weight

    def announced(self, flags: int, micro_batches: int = 1) -> tuple[float, int]:
        """Return what the header says: the weight of a micro-batch, their mean, and whether the user set it."""
        if self.weight is not None:
            flags |= Flag.WEIGHTED
        if flags & (Flag.SHADOW | Flag.ABORTED):
            return 0.0, flags
        if not self.num_closed or not micro_batches:
            return self._now, flags
        count = micro_batches if self.k > 1 else self.num_closed + 1
        return (self.closed + self._now * (count - self.num_closed)) / micro_batches, flags

    def scale(self) -> float:
        """Return what this rank multiplies its gradients by before they travel."""
        self._used_unit = self.unit
        weight = self._now if self.base is None else self.base
        if weight == self.unit == 1.0:
            return self._plain_scale
        return mean_scale(self._size * self.k * self.unit, self.combine, weight)

    def factor(self, headers: Headers) -> float:
        """Return what the sum is multiplied by when it is back."""
        total = headers.total_weight
        if self.combine == "sum" or total == 0:
            return 1.0
        return self._size * self.k * self._used_unit / total

    def follow(self, headers: Headers) -> None:
        """Choose the unit for what comes next; equal on all ranks."""
        mean = headers.total_weight / (self._size * self.k)
        weighted = bool(headers.flags & Flag.WEIGHTED) and mean > 0
        self.unit = 2.0 ** math.floor(math.log2(mean)) if weighted else 1.0


class MicroBatches:
    """Makes what stands in `.grad` fit to be added to."""

    def __init__(self, entries: Sequence[GradEntry], weighting: Weighting) -> None:
        self._entries = entries
        self._weighting = weighting
        self._aside: list[tuple[GradEntry, torch.Tensor]] = []  # sums of before
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._weighting.begin()
        self._weighed_at = 0  # backwards of this step when a weight was set last
        self._heavier: list[tuple[GradEntry, torch.Tensor]] = []  # what is there, while lighter ones are aside

    def set_weight(self, weight: float, micro_batches: int, backwards: int) -> None:
        """Count so much what comes; so many micro-batches of the window are done, and backwards of the step."""
        if self._weighting.k == 1:  # under no_sync(): what lies between two calls counts as one
            micro_batches = self._weighting.num_closed + (backwards > self._weighed_at)
        self._weighed_at = backwards
        self._weighting.set(weight, micro_batches)

    @torch.no_grad()
    def weigh(self) -> bool:
        """A backward begins: let what is there have its weight; False if its gradients must be kept aside."""
        self.merge()
        if self._weighting.comes_apart:
            self._heavier = [(each, each.param.grad) for each in self._entries if each.param.grad is not None]
            for entry, _ in self._heavier:
                entry.param.grad = None
            if self._heavier:
                return False
            self._weighting.nothing_there()  # the loss of what came before touched no parameter
        if (ratio := self._weighting.take_over()) != 1.0:
            for entry in self._entries:
                if entry.param.grad is not None:
                    entry.param.grad = entry.param.grad.mul_(ratio) if ratio else None
        return True

    def set_aside(self) -> None:
        """A sum that was synchronized before must not be added up over the ranks again."""
        if self._weighting.combine == "sum" and not self._aside:
            for entry in self._entries:
                if entry.param.grad is not None:
                    self._aside.append((entry, entry.param.grad.detach().clone()))
                    entry.param.grad = None

    def put_back(self) -> None:
        """Add what was set aside to what is there."""
        for entry, grad in self._aside:
            entry.param.grad = grad if entry.param.grad is None else entry.param.grad + grad
        self._aside = []

    def drop_aside(self) -> None:
        """The step came to nothing, and with it what stood there before."""
        self._aside = []

    def nothing_came(self, backwards: int) -> None:
        """A backward brought no gradient; so many did before."""
        self.merge()
        if not backwards:
            self._weighting.nothing_there()

    @torch.no_grad()
    def merge(self) -> None:
        """Add the light gradients that were kept aside to those that were there."""
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
