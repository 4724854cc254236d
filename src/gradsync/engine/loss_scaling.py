"""The GradScaler that `attach` was given, made to bear steps without gradients.

torch's own ends in "No inf checks were recorded" where an optimizer finds no `.grad`, and there are such steps on
every rank at once: inside a window of `accumulate(k)`, after a step that all dropped, while `delayed(k)` begins. As
with `fully_shard`, the object gets a class of its own, made from the one it had:

    unscale_   nothing to unscale            no gradient at all: nothing
    step       check, optimizer.step()       no gradient at all: optimizer.step(), which finds nothing to do
    update     the scale for the next step   nothing was checked: the scale stays, since this was no step

Where all ranks dropped a step for a NaN or Inf, nobody's `.grad` shows it any more: update lowers the scale all the
same, as it would have, or every step that follows would overflow again.

A rank whose loss touched no parameter takes part before the scaler looks for gradients. If the scale changes inside a
window all the same (another optimizer found an infinity), the gradients in it are made those of the new scale.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradsync.engine.loop import StepLoop


class ScaledSteps:
    """The questions that a scaler asks of one GradSync."""

    def __init__(self, steps: StepLoop) -> None:
        self._reference = weakref.ref(steps)  # a scaler may outlive a model that was dropped
        self._num_skipped = 0  # steps that were dropped for a NaN or Inf, as far as the scale has followed

    @property
    def _steps(self) -> StepLoop:
        steps = self._reference()
        assert steps is not None, "an optimizer keeps it that is about to step"
        return steps

    def has(self, optimizer: Optimizer) -> bool:
        """Return whether this optimizer's steps are looked after."""
        steps = self._reference()
        return steps is not None and steps.listens and steps.step_counts.knows(optimizer)

    def before(self, optimizer: Optimizer) -> None:
        """The scaler looks for gradients: a synchronization that this rank's backward missed comes first."""
        self._steps.dropped_batches.drop_raised_before(optimizer)
        if self._steps.step_counts.missed(optimizer):
            self._steps.take_part(optimizer)
            self._steps.step_counts.is_next(optimizer)

    def after(self, optimizer: Optimizer) -> None:
        """An optimizer's step has ended, perhaps without `optimizer.step()`, as the scaler found an infinity."""
        self._steps.step_counts.stepped(optimizer)

    def overflowed(self) -> bool:
        """Return whether all ranks have dropped a step for a NaN or Inf since this was asked last."""
        steps, before = self._reference(), self._num_skipped
        if steps is not None:
            self._num_skipped = steps.synchronization.health_log.skipped_steps
        return self._num_skipped > before

    def keeps_gradients(self) -> bool:
        """Return whether there are gradients of the scale of now that are not to be applied yet."""
        steps = self._reference()
        return steps is not None and steps.pace.mid_window

    def rescale(self, ratio: torch.Tensor) -> None:
        """The scale was multiplied by this."""
        steps = self._reference()
        if steps is not None:
            steps.pace.rescale(ratio)


# Beside the scaler, not in it: its copies and pickles are stock ones.
_followers: weakref.WeakKeyDictionary[GradScaler, list[ScaledSteps]] = weakref.WeakKeyDictionary()
_classes: dict[type, type] = {}


class ScalerFollower:
    """One GradSync follows one scaler, which may have several."""

    def __init__(self, scaler: GradScaler | None, steps: StepLoop) -> None:
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._mine = ScaledSteps(steps)
        if self.scaler is not None:
            _followers.setdefault(self.scaler, []).append(self._mine)
            self.scaler.__class__ = _tolerant(type(self.scaler))

    def broadcast(self) -> None:
        """The scale was made another rank's, which has followed what all skipped."""
        self._mine.overflowed()

    def close(self) -> None:
        """Follow it no more; the last one leaves it as it was."""
        if self.scaler is None or self._mine not in _followers.get(self.scaler, []):
            return
        _followers[self.scaler].remove(self._mine)
        if not _followers[self.scaler]:
            del _followers[self.scaler]
            self.scaler.__class__ = _stock(self.scaler)


class _Tolerant(GradScaler):
    """The part that stands before the scaler's own methods."""

    def unscale_(self, optimizer: Optimizer) -> None:
        mine = _follower(self, optimizer)
        if mine is not None:
            mine.before(optimizer)
        if mine is None or _has_gradients(optimizer):
            super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        mine = _follower(self, optimizer)
        if mine is None:
            return super().step(optimizer, *args, **kwargs)
        mine.before(optimizer)
        try:
            if _has_gradients(optimizer):
                return super().step(optimizer, *args, **kwargs)
            loss: float | None = optimizer.step(*args, **kwargs)
            return loss
        finally:
            mine.after(optimizer)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        followers = _followers.get(self, [])
        if self._scale is not None and sum(each.overflowed() for each in followers):  # each is asked
            state = self._per_optimizer_states[id(followers)]  # as if one more optimizer had found it
            state["found_inf_per_device"][self._scale.device] = torch.ones_like(self._scale)
        checked = any(state["found_inf_per_device"] for state in self._per_optimizer_states.values())
        if new_scale is None and not checked:
            self._per_optimizer_states.clear()
            return
        keepers = [each for each in followers if each.keeps_gradients()]
        before = None if self._scale is None or not keepers else self._scale.clone()
        super().update(new_scale)
        if before is not None and self._scale is not None:
            for each in keepers:
                each.rescale(self._scale / before)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copies and pickles are of the class that it had."""
        return _blank, (_stock(self),), self.__getstate__()


def _blank(stock: type[GradScaler]) -> GradScaler:
    return stock.__new__(stock)


def _stock(scaler: GradScaler) -> type[GradScaler]:
    """The class that it had."""
    return type(scaler).__mro__[2]


def _tolerant(base: type) -> type:
    if issubclass(base, _Tolerant):
        return base
    if base not in _classes:
        names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
        _classes[base] = type(base.__name__, (_Tolerant, base), names)
    return _classes[base]


def _follower(scaler: GradScaler, optimizer: Optimizer) -> ScaledSteps | None:
    return next((each for each in _followers.get(scaler, []) if each.has(optimizer)), None)


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(param.grad is not None for group in optimizer.param_groups for param in group["params"])
