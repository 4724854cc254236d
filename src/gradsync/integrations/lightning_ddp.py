"""Lightning with its own DDPStrategy: our hook under the DDP that Lightning makes.

    hook = DDPHook(gs.Plan(compress=gs.int8()))
    strategy = DDPStrategy(ddp_comm_state=hook, ddp_comm_hook=average_bucket)
    trainer = L.Trainer(strategy=strategy, callbacks=[hook])

Note [Why a callback too]
    `gs.ddp_hook` opens connections for one DDP model, with all ranks at once, before the first backward. When
    Lightning takes a hook, that model does not exist yet; when the hook is first called, backward runs. Between the two
    a callback is told that fit begins, and of checkpoints too. And Lightning registers hooks on CUDA devices only:
    elsewhere the callback does.
"""

# No postponed annotations here: DDP reads those of the hook, and wants the types themselves.

from collections.abc import Mapping
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

try:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise ImportError(
        "gradsync.integrations.lightning_ddp needs Lightning: pip install 'gradsync[lightning]'"
    ) from error

from gradsync.integrations.ddp_hook import ddp_hook
from gradsync.integrations.ddp_state import DDPState
from gradsync.integrations.lightning_state import KEY
from gradsync.plan.guard import Guard
from gradsync.plan.sync_plan import Plan

__all__ = ["DDPHook", "average_bucket"]


class DDPHook(Callback):
    """The state of `average_bucket`, and the callback that opens it; see docs/ddp.md for what a hook cannot do.

    Args:
        plan: What travels, and which way; see `gs.ddp_hook`.
        guard: Bounds on waits.
    """

    def __init__(self, plan: Plan, guard: Guard | None = None) -> None:
        self._plan, self._guard = plan, guard
        self.state: DDPState | None = None
        self._loaded: Mapping[str, torch.Tensor] | None = None  # to continue from, when a DDP model exists
        self._left: dict[str, torch.Tensor] | None = None  # by a fit that has ended

    def launch(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self.state is None:
            raise ValueError("this DDPHook is not open; pass it to the Trainer too, as Trainer(callbacks=[hook])")
        return self.state.launch(bucket)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Every rank is here; Lightning has wrapped the model."""
        ddp, strategy = trainer.strategy.model, trainer.strategy
        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(
                f"DDPHook needs Trainer(strategy=DDPStrategy(...)), and {type(strategy).__name__} made no DDP model; "
                "without DDP use GradSyncStrategy(plan)"
            )
        self.state, _ = ddp_hook(self._plan, ddp, guard=self._guard)
        registered = getattr(strategy, "_ddp_comm_hook", None) is average_bucket
        if not (registered and strategy.root_device.type == "cuda"):
            ddp.register_comm_hook(self, average_bucket)
        if self._loaded is not None:
            self.state.load_state_dict(self._loaded)
        self._loaded = self._left = None

    # Every rank is in these: see [Who is there when a checkpoint is written] in lightning_state.py

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        state = self._left if self.state is None else self.state.state_dict(all_ranks=not trainer.interrupted)
        if state is not None:
            checkpoint[KEY] = state

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._loaded = checkpoint.get(KEY)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.state is not None:
            self._left = self.state.state_dict(all_ranks=True)
            self.state.close()
            self.state = None


def average_bucket(state: DDPHook, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook: DDP calls it when a bucket is full."""
    return state.launch(bucket)
