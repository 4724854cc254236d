"""Hugging Face's Trainer: `attach(trainer, plan)` before `trainer.train()`, and gradsync takes the place of DDP.

    trainer = Trainer(model, args, train_dataset=data)
    attach(trainer, gs.Plan(compress=gs.int8()))
    trainer.train()

A callback alone sees neither the wrapped model, nor where a run resumes from, nor what later callbacks want; a subclass
would leave out who has one already (TRL's, yours). So this one trainer is changed in place: its Accelerator no longer
wraps, `train` notes the checkpoint, `log` adds our stats, replicas meet before it evaluates or saves, and a callback:

    train ─ model and optimizer loaded, placed ─ on_train_begin ─ steps ─ evaluate? save? ─ on_save ─ … ─ on_train_end
                                                 attach, load             meet              save          detach

How losses, tokens and micro-batches are scaled is in [What Accelerate asks of a model].
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gradsync.engine.handle import GradSync
from gradsync.integrations import rank_files
from gradsync.integrations.without_ddp import attach_prepared, check, refuse_wrapped
from gradsync.plan.auto import Auto
from gradsync.plan.guard import Guard
from gradsync.plan.pace_recipe import exchange_of
from gradsync.plan.paces import kind_of
from gradsync.plan.sync_plan import Plan

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    raise ImportError("gradsync's adapter needs Transformers: pip install 'gradsync[accelerate]'") from error


def attach(
    trainer: Trainer,
    plan: Plan | Auto | None = None,
    *,
    guard: Guard | None = None,
    trace: str | os.PathLike[str] | None = None,
) -> GradSyncCallback:
    """Let `trainer.train()` synchronize by gradsync; `plan`, `guard` and `trace` are those of `gs.attach`.

    Gradient accumulation, clipping, evaluation, `average_tokens_across_devices` and `resume_from_checkpoint` work as
    with DDP. Stats are logged as `gradsync/<key>`. The callback that is returned has the GradSync as `.sync`.
    """
    _refuse(trainer, plan, guard)
    callback = GradSyncCallback(trainer, plan, guard, trace)
    trainer.add_callback(callback)
    prepare_model, train, log = trainer.accelerator.prepare_model, trainer.train, trainer.log
    evaluate_and_save = trainer._maybe_log_save_evaluate

    def prepare_unwrapped(model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        return prepare_model(model, device_placement=device_placement, evaluation_mode=True)

    def train_and_name(resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        callback.resumed_from = _folder(trainer, resume_from_checkpoint)
        try:
            return train(resume_from_checkpoint, *args, **kwargs)
        except RuntimeError:
            if callback.sync is None:
                raise
            with callback.sync.naming_lost("a collective of the Trainer's own"):
                raise

    def log_with_stats(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        log(logs | callback.stats() if "loss" in logs else logs, *args, **kwargs)

    def meet_and_save(*args: Any, **kwargs: Any) -> None:
        callback.meet(trainer.control)
        evaluate_and_save(*args, **kwargs)
        callback.meet(trainer.control)  # an evaluation may end training

    trainer.accelerator.prepare_model = prepare_unwrapped
    trainer.train = train_and_name
    trainer.log = log_with_stats
    trainer._maybe_log_save_evaluate = meet_and_save
    return callback


class GradSyncCallback(TrainerCallback):
    """Attaches when training begins, keeps its state with every checkpoint, detaches at the end. Made by `attach`."""

    def __init__(
        self, trainer: Trainer, plan: Plan | Auto | None, guard: Guard | None, trace: str | os.PathLike[str] | None
    ) -> None:
        self.sync: GradSync | None = None
        self.resumed_from: Path | None = None
        self._trainer = trainer
        self._terms = (plan, guard, trace)

    def stats(self) -> dict[str, float]:
        """Return what `sync.stats()` says in numbers, as the Trainer logs it."""
        stats = {} if self.sync is None else self.sync.stats()
        return {f"gradsync/{key}": value for key, value in stats.items() if isinstance(value, int | float)}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        trainer = self._trainer
        refuse_wrapped(trainer.model_wrapped)
        if self.sync is not None:  # the Trainer begins anew, with smaller batches
            self.sync.detach()
        assert trainer.optimizer is not None
        self.sync = attach_prepared(trainer.accelerator, trainer.model_wrapped, [trainer.optimizer], *self._terms)
        if self.resumed_from is not None:
            rank_files.load(self.sync, self.resumed_from)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.sync is not None and not args.save_only_model:
            rank_files.save(self.sync, Path(args.output_dir or "") / f"checkpoint-{state.global_step}")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.sync is not None:
            self.sync.detach()

    def meet(self, control: TrainerControl) -> None:
        """Make one model of what is saved and evaluated: paces that let replicas differ average before."""
        sync, optimizer = self.sync, self._trainer.optimizer
        assert sync is not None
        assert optimizer is not None
        if (control.should_save or control.should_evaluate) and not sync.replicas_equal:
            sync.drain()
        drains = control.should_training_stop and not exchange_of(sync.plan.pace).every_backward
        while drains and sync.drain():
            optimizer.step()
            optimizer.zero_grad()


def _refuse(trainer: Trainer, plan: Plan | Auto | None, guard: Guard | None) -> None:
    if any(isinstance(callback, GradSyncCallback) for callback in trainer.callback_handler.callbacks):
        raise ValueError("this trainer is attached already; make a new Trainer for another plan")
    if isinstance(plan, Plan) and (window := exchange_of(plan.pace).window) is not None:
        raise ValueError(
            f"pace={kind_of(plan.pace)}({window}) is not for a Trainer, whose steps and learning rate would run "
            f"{window} times as fast; set gradient_accumulation_steps={window} in TrainingArguments instead"
        )
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"this process has {trainer.args.n_gpu} GPUs, and the Trainer would use DataParallel; start a process for "
            f"each: torchrun --nproc-per-node {trainer.args.n_gpu}"
        )
    check(trainer.accelerator, plan, guard, trainer.args.gradient_accumulation_steps)


def _folder(trainer: Trainer, resume: str | bool | None) -> Path | None:
    """The checkpoint that `train` resumes from, found as it finds it."""
    folder = get_last_checkpoint(trainer.args.output_dir) if resume is True else resume
    return Path(str(folder)) if folder else None
