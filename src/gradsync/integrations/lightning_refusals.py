"""The refusals of what a plan and Lightning's own options cannot do together: at setup, before anything is attached."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from gradsync.plan.auto import Auto
from gradsync.plan.guard import Guard
from gradsync.plan.pace_recipe import exchange_of
from gradsync.plan.paces import every_step, kind_of
from gradsync.plan.sync_plan import Plan


def refuse(plan: Plan | Auto | None, guard: Guard | None, accumulating: str | None, scaled: bool) -> None:
    """Raise ValueError with the way out. `scaled`: a GradScaler steps the optimizers."""
    pace = plan.pace if isinstance(plan, Plan) else every_step()
    exchange = exchange_of(pace)
    if exchange.window is not None and accumulating is not None:
        raise ValueError(
            f"pace={kind_of(pace)}({exchange.window}) and {accumulating} would accumulate twice; leave the "
            "pace out, and let Lightning count"
        )
    skips = guard is not None and guard.nonfinite == "skip"
    if scaled and (skips or exchange.some_steps_empty):
        raise ValueError(
            f'the loss scaler of precision="16-mixed" refuses a step without gradients, which '
            f"{'Guard(nonfinite=skip)' if skips else pace} makes at times; leave that out, or use bf16-mixed"
        )


def accumulating(trainer: pl.Trainer) -> str | None:
    """Return what counts micro-batches on Lightning's side, if anything does.

    The callback is asked itself, for it tells the Trainer only when an epoch begins, and that may be the fifth.
    """
    for each in trainer.callbacks:
        if isinstance(each, GradientAccumulationScheduler) and each.going_to_accumulate_grad_batches():
            return f"GradientAccumulationScheduler({each.scheduling})"
    count = trainer.accumulate_grad_batches
    return f"Trainer(accumulate_grad_batches={count})" if count > 1 else None
