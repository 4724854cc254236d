"""What two ranks do for `test_hf_trainer`: the same training with the Trainer's own DDP and with gradsync."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate_training import Weights, as_launched, differing, from_rank_0, refusal, sentences, tiny
from transformers import Trainer, TrainerCallback, TrainingArguments

import gradsync as gs
from gradsync.integrations.transformers import attach
from gradsync.plan.auto import Auto

QUIET = {"report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False, "use_cpu": True, "save_steps": 1000}


def laws(folder: Path) -> dict[str, Any]:
    """Everything in one launch; at the end rank 1 dies, and rank 0 says what it saw."""
    as_launched()
    warnings.simplefilter("ignore")  # the Trainer's own; those of ours that count are caught one by one
    return {
        "tokens": compare(folder / "tokens", average_tokens_across_devices=True),
        "no tokens": compare(folder / "plain", average_tokens_across_devices=False, bf16=True),
        "auto": compare(folder / "auto", gs.auto(allow="exact", steps=1)),
        "compressed": train_compressed(folder / "compressed"),
        "best": load_best(folder / "best"),
        "local_sgd": train_locally(folder / "local"),
        "delayed": train_late(folder / "delayed"),
        "refused": refusals(folder / "refused"),
        "killed": be_killed(folder / "killed"),
    }


class Ragged(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Sentences with unequally many labels, so that a mean over ranks is not a mean over tokens."""

    def __init__(self, count: int) -> None:
        self._rows = sentences(count)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self._rows[index].clone()
        labels[: 2 + 3 * index % 11] = -100
        return {"input_ids": self._rows[index], "labels": labels}


def make(folder: Path, **options: Any) -> Trainer:
    chosen = {"per_device_train_batch_size": 2, "learning_rate": 3e-3, "logging_steps": 2, "max_steps": 6, **QUIET}
    args = TrainingArguments(output_dir=str(folder), **{**chosen, **options})
    return Trainer(model=tiny(), args=args, train_dataset=Ragged(40), eval_dataset=Ragged(8))


def weights(trainer: Trainer) -> Weights:
    return {name: weight.clone() for name, weight in trainer.model.state_dict().items()}


def compare(folder: Path, plan: gs.Plan | Auto | None = None, **options: Any) -> dict[str, Any]:
    """The model has dropout. Ten micro-batches of an epoch in windows of four: the last one of each epoch is short."""
    stock = make(folder / "stock", gradient_accumulation_steps=4, max_grad_norm=0.5, **options)
    stock.train()
    ours = make(folder / "ours", gradient_accumulation_steps=4, max_grad_norm=0.5, **options)
    attach(ours, plan)
    ours.train()
    logs = [[row["loss"] for row in trainer.state.log_history if "loss" in row] for trainer in (stock, ours)]
    return {
        "wrapped": [type(trainer.model_wrapped).__name__ for trainer in (stock, ours)],
        "differing": differing(weights(stock), weights(ours)),
        "losses": logs,
        "logged": sorted(key for key in ours.state.log_history[0] if key.startswith("gradsync/")),
    }


def train_compressed(folder: Path) -> dict[str, Any]:
    """16 steps in 8 bits; then the last 8 again, from the checkpoint after 8."""
    options: dict[str, Any] = {"max_steps": 16, "save_steps": 8}
    plan = gs.Plan(compress=gs.int8())
    straight = make(folder, **options)
    attach(straight, plan)
    straight.train()
    dist.barrier()
    files = sorted(file.name for file in (folder / "checkpoint-8").glob("gradsync*"))
    again = make(folder, **options)
    attach(again, plan)
    again.train(resume_from_checkpoint=str(folder / "checkpoint-8"))
    dist.barrier()
    last = make(folder, **options | {"max_steps": 18})
    callback = attach(last, plan)
    last.train(resume_from_checkpoint=True)
    return {
        "losses": [row["loss"] for row in straight.state.log_history if "loss" in row],
        "resumed": differing(weights(straight), weights(again)),
        "replicas": differing(weights(straight), from_rank_0(weights(straight))),
        "files": files,
        "resumed from": callback.resumed_from.name if callback.resumed_from else None,
    }


def load_best(folder: Path) -> dict[str, Any]:
    """Evaluated and saved every second step; at the end the best of them is loaded."""
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    stock = make(folder / "stock", load_best_model_at_end=True, **options)
    stock.train()
    ours = make(folder / "ours", load_best_model_at_end=True, **options)
    attach(ours)
    ours.train()
    metrics = [trainer.state.best_metric for trainer in (stock, ours)]
    return {"metric": metrics, "differing": differing(weights(stock), weights(ours))}


def train_locally(folder: Path) -> dict[str, Any]:
    """Replicas differ between two averages, but what is evaluated after step 3 and saved after 4 is their mean."""
    trainer = make(folder)
    attach(trainer, gs.Plan(pace=gs.local_sgd(100)))
    late = Late()
    trainer.add_callback(late)
    trainer.train()
    dist.barrier()
    return {
        "replicas": differing(weights(trainer), from_rank_0(weights(trainer))),
        "differed": late.differed,
        "evaluated": late.evaluated,
        "files": sorted(file.name for file in (folder / "checkpoint-4").glob("gradsync*")),
    }


class Late(TrainerCallback):
    """Added after `attach`: by the time that it wants an evaluation and a checkpoint, gradsync's has been asked."""

    differed: list[str]
    evaluated: list[str]

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        control.should_evaluate = state.global_step == 3
        control.should_save = state.global_step == 4
        if control.should_evaluate:
            self.differed = differing(model.state_dict(), from_rank_0(model.state_dict()))

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.evaluated = differing(model.state_dict(), from_rank_0(model.state_dict()))


def train_late(folder: Path) -> dict[str, Any]:
    trainer = make(folder)
    callback = attach(trainer, gs.Plan(pace=gs.delayed(1)))
    trainer.train()
    assert callback.sync is not None
    waiting = callback.sync.stats()["num_waiting"]
    return {"replicas": differing(weights(trainer), from_rank_0(weights(trainer))), "waiting": waiting}


def refusals(folder: Path) -> dict[str, str]:
    trainer = make(folder)
    said = {"window": refusal(lambda: attach(trainer, gs.Plan(pace=gs.accumulate(4))))}
    said["plan"] = refusal(lambda: attach(trainer, "int8"))  # type: ignore[arg-type]
    said["guard"] = refusal(lambda: attach(trainer, guard=5))  # type: ignore[arg-type]
    attach(trainer)
    said["twice"] = refusal(lambda: attach(trainer))
    late = make(folder, max_steps=1)
    late.model = late.accelerator.prepare_model(late.model)
    late.model_wrapped = late.model
    attach(late)
    said["wrapped"] = refusal(late.train)
    return said


class Killer(TrainerCallback):
    """Rank 1 dies when its step has ended: rank 0 then waits for its number of tokens, which the Trainer gathers."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def be_killed(folder: Path) -> str:
    trainer = make(folder, max_steps=8)
    trainer.add_callback(Killer())
    attach(trainer)
    try:
        trainer.train()
    except gs.PeerLost as error:
        return f"{error.ranks} {error}"
    return "nobody was missed"
