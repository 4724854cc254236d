"""Hugging Face's Trainer with gradsync: a small transformer that learns Python's own source text, gradients in 8 bits.

    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py --folder /tmp/run
    accelerate launch --multi_gpu --num_processes 2 examples/hf_trainer.py --folder /tmp/run

One line differs from a script without gradsync: `attach(trainer, plan)`. A second call, with more steps, resumes from
the last checkpoint, and from what each rank had not sent yet.
"""

from __future__ import annotations

import argparse
import argparse as source
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import gradsync as gs
from gradsync.integrations.transformers import attach

LENGTH = 64


class Source(Dataset):  # type: ignore[type-arg]
    """A module of the standard library, as bytes, in pieces."""

    def __init__(self) -> None:
        data = torch.frombuffer(bytearray(Path(source.__file__).read_bytes()), dtype=torch.uint8).long()
        self._rows = data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def build() -> torch.nn.Module:
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints go; the last one is resumed")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()

    args = TrainingArguments(
        output_dir=str(arguments.folder),
        max_steps=arguments.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        logging_steps=10,
        save_steps=20,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
        report_to="none",
    )
    trainer = Trainer(model=build(), args=args, train_dataset=Source())
    attach(trainer, gs.Plan(compress=gs.int8()))
    resumed = arguments.folder.exists() and get_last_checkpoint(str(arguments.folder)) is not None
    trainer.train(resume_from_checkpoint=resumed)

    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    if trainer.is_world_process_zero():
        print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {trainer.state.global_step} steps", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
