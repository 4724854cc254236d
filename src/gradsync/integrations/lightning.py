"""Lightning: a strategy that attaches the model instead of wrapping it in DDP.

    trainer = L.Trainer(strategy=GradSyncStrategy(gs.Plan(compress=gs.int8())), devices=2)

Everything that is not gradients (launching, the process group, logging, samplers) stays what Lightning's own
DDPStrategy does; only SyncBatchNorm works on CPUs too (`batch_norm`). To keep DDP itself, see `lightning_ddp`.

Note [Where Lightning calls]
    setup             BatchNorm becomes SyncBatchNorm, if so wished; then the optimizers exist: attach, on every rank at
                      once; for fit only
    training_step     through the module's own `__call__`, so that our hooks see where a step begins, as DDP's would
    backward          nothing: the hooks are on the parameters; `accumulate_grad_batches` runs under no_sync()
    optimizer_step    nothing: backward runs in a closure inside of `step()`; see [Closures] in engine/hooks.py
    save_checkpoint   every rank is here: the state of all goes into the file that rank 0 writes
    teardown          detach
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch

try:
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise ImportError("gradsync.integrations.lightning needs Lightning: pip install 'gradsync[lightning]'") from error

from gradsync.engine.attach import attach, check_terms
from gradsync.engine.parameters import check_ignore
from gradsync.integrations.batch_norm import convert, revert
from gradsync.integrations.lightning_refusals import accumulating, refuse
from gradsync.integrations.lightning_state import StatefulStrategy
from gradsync.plan.auto import Auto
from gradsync.plan.guard import Guard
from gradsync.plan.pace_recipe import exchange_of
from gradsync.plan.sync_plan import Plan

__all__ = ["GradSyncStrategy"]


class GradSyncStrategy(StatefulStrategy):
    """Keep the replicas of a LightningModule in step; `trainer.strategy.sync` is the `GradSync`.

    Args:
        plan: How gradients travel; see `gs.Plan`, and `gs.auto()`.
        guard: Bounds on waits, what a NaN does, and replicas that differ; see `gs.Guard`.
        trace: A folder for `gradsync report`; see `gs.attach`.
        buffers: "broadcast": rank 0's BatchNorm statistics go to all; "none": each rank keeps its own.
        ignore: Names or tensors to leave alone.
        process_group_backend: As in Lightning's DDPStrategy; so are the next two.
        timeout: Of Lightning's own collectives. `guard` bounds ours.
        start_method: "popen" runs the script once per rank.
    """

    def __init__(
        self,
        plan: Plan | Auto | None = None,
        *,
        guard: Guard | None = None,
        trace: str | os.PathLike[str] | None = None,
        buffers: Literal["broadcast", "none"] = "broadcast",
        ignore: Iterable[str | torch.Tensor] = (),
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        check_terms(plan, guard)
        check_ignore(ignore)
        super().__init__(process_group_backend=process_group_backend, timeout=timeout, start_method=start_method)
        self._plan, self._guard, self._trace = plan, guard, trace
        self._buffers: Literal["broadcast", "none"] = buffers
        self._ignore = tuple(ignore)

    # A fit begins and ends

    def configure_ddp(self) -> None:
        """Leave the model as it is, where Lightning would wrap it."""

    def setup(self, trainer: pl.Trainer) -> None:
        if type(self._layer_sync) is TorchSyncBatchNorm and self.root_device.type == "cpu":  # sync_batchnorm=True
            self._layer_sync = _SyncBatchNorm()
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        scaler = self.precision_plugin.scaler if isinstance(self.precision_plugin, MixedPrecision) else None
        refuse(self._plan, self._guard, accumulating(trainer), scaled=scaler is not None)
        assert self.lightning_module is not None
        sync = attach(
            self.lightning_module,
            self.optimizers,
            self._plan,
            buffers=self._buffers,
            ignore=self._ignore,
            guard=self._guard,
            scaler=scaler,
            trace=self._trace,
        )
        self._begin_fit(sync)

    def on_train_end(self) -> None:
        """Apply what the pace still has under way: the model that fit leaves is every rank's."""
        super().on_train_end()
        if self.sync is None or exchange_of(self.sync.plan.pace).every_backward:
            return  # Lightning drops a window of accumulate_grad_batches that was cut short, and so do we
        while self.sync.drain():
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def teardown(self) -> None:
        self._end_fit()
        super().teardown()

    # A step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        with self.precision_plugin.train_step_context(), self._naming("a collective of the training step"):
            return self._forward_redirection(module, module, "training_step", *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Lightning's `accumulate_grad_batches`, and `toggled_optimizer(sync_grad=False)` in manual optimization."""
        with nullcontext() if self.sync is None else self.sync.no_sync():
            yield

    def stats(self) -> dict[str, float]:
        """The numbers of `sync.stats()` under `gradsync/`: `self.log_dict(self.trainer.strategy.stats())`."""
        found = {} if self.sync is None else self.sync.stats()
        return {f"gradsync/{key}": float(value) for key, value in found.items() if isinstance(value, int | float)}


class _SyncBatchNorm(LayerSync):
    """Our own batch normalization: Lightning's has kernels for GPUs only."""

    def apply(self, model: torch.nn.Module) -> torch.nn.Module:
        return convert(model)

    def revert(self, model: torch.nn.Module) -> torch.nn.Module:
        return revert(model)
