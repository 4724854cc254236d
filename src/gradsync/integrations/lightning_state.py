"""The work of a Lightning strategy beside the gradients: it carries our state in checkpoints, and names a lost rank.

Note [Who is there when a checkpoint is written]
    `Trainer.save_checkpoint` runs on every rank, and rank 0 writes. So the states of all ranks are gathered there, and
    a resumed run hands each rank its own. Two times not everybody is there: after an exception, when this rank's own
    state has to do, and after fit, when the model is detached. For the latter, what was gathered at the end of fit is
    kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy

from gradsync.engine.handle import GradSync

KEY = "gradsync"  # in Lightning's checkpoint


class StatefulStrategy(DDPStrategy):
    """A strategy with a `GradSync` in it, between setup and teardown of a fit; `sync` stays until the next one."""

    sync: GradSync | None = None
    _layer_sync: Any  # Lightning's: what makes BatchNorm a SyncBatchNorm
    _attached = False
    _interrupted = False
    _left: dict[str, torch.Tensor] | None = None  # by a fit that has ended

    def _begin_fit(self, sync: GradSync) -> None:
        self.sync, self._attached, self._interrupted, self._left = sync, True, False, None

    def _end_fit(self) -> None:
        """Every rank calls it, unless an exception has ended the fit."""
        if self.sync is None or not self._attached:
            return
        if not self._interrupted:
            self._left = self.sync.state_dict(all_ranks=True)
        self._attached = False
        self.sync.detach()

    def on_exception(self, exception: BaseException) -> None:
        self._interrupted = True
        super().on_exception(exception)

    # Checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if "optimizer_states" in checkpoint:  # otherwise it is to hold weights only
            state = self._state()
            checkpoint = checkpoint if state is None else checkpoint | {KEY: state}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _state(self) -> dict[str, torch.Tensor] | None:
        """The state of all ranks, or of this one: see [Who is there when a checkpoint is written]."""
        if self.sync is None or not self._attached:
            return self._left
        assert self.lightning_module is not None
        if self.lightning_module.trainer.interrupted:
            return self.sync.state_dict()
        state = self.sync.state_dict(all_ranks=True)
        if self.is_global_zero and not self.sync.replicas_equal:
            warnings.warn(
                f"this checkpoint holds rank 0's model, and with {self.sync.plan.pace!r} the ranks differ now: a run "
                "that resumes from it is another run. Save right after an average (every k-th step), or after fit",
                stacklevel=2,
            )
        return state

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Every rank is here, with the same file, after setup."""
        super().load_optimizer_state_dict(checkpoint)
        if self.sync is not None and self._attached and KEY in checkpoint:
            self.sync.load_state_dict(checkpoint[KEY])

    # What Lightning itself sends: gloo says that a connection closed, and not whose

    def _naming(self, what: str) -> AbstractContextManager[None]:
        return nullcontext() if self.sync is None else self.sync.naming_lost(what)

    def backward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._naming("a collective of backward"):
            return super().backward(*args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with self._naming("a barrier of Lightning"):
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        with self._naming("a broadcast of Lightning"):
            return super().broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        with self._naming("a reduction of Lightning"):
            return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: torch.Tensor, group: Any | None = None, sync_grads: bool = False) -> torch.Tensor:
        with self._naming("a gather of Lightning"):
            return super().all_gather(tensor, group, sync_grads)
