"""What a GradScaler multiplies losses by, for gradients that are applied later than they were made.

backward t       .grad = g · s          s: the scale of then
step t + k       .grad = g · s · s'/s   s': the scale of now, by which `unscale_` divides
"""

from __future__ import annotations

import sys
from types import FrameType

from torch.amp import GradScaler

from gradsync.errors import GradSyncError
from gradsync.transport.lane import Lane


class Scaling:
    """The scaler that `attach` was told of, or none."""

    def __init__(self, scaler: GradScaler | None) -> None:
        self._scaler = scaler

    @property
    def in_use(self) -> bool:
        return self._scaler is not None and self._scaler.is_enabled()

    def now(self) -> float:
        """The scale of a gradient that is made now; without a scaler 1."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def check_caller(self, lane: Lane) -> None:
        """Inside of an `optimizer.step()` that applies gradients: ours must be the scaler that calls it."""
        caller = _calling_scaler()
        if caller is None and self.in_use:
            raise GradSyncError(
                f"{lane.place()} optimizer.step() was called without the GradScaler that attach was given, so it would "
                "apply gradients multiplied by its scale: call scaler.step(optimizer) and scaler.update(), also after "
                "sync.drain()"
            )
        if caller is not None and caller is not self._scaler and caller.is_enabled():
            known = "knows of none" if self._scaler is None else "was given another one"
            raise GradSyncError(
                f"{lane.place()} a GradScaler steps the optimizer and gradsync {known}: delayed(k) applies gradients "
                "later than they were made, when the scale may have changed. Pass it, gs.attach(model, optimizer, "
                "plan, scaler=scaler)"
            )


def _calling_scaler() -> GradScaler | None:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "step" and isinstance(scaler := frame.f_locals.get("self"), GradScaler):
            return scaler
        frame = frame.f_back
    return None
