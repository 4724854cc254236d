"""Accelerate with gradsync: a small transformer that learns Python's own source text, gradients in 8 bits.

    torchrun --standalone --nproc-per-node 2 examples/accelerate_train.py
    accelerate launch --multi_gpu --num_processes 2 examples/accelerate_train.py

Two lines differ from a script without gradsync: the import, and `prepare(accelerator, ...)` instead of
`accelerator.prepare(...)`. Accumulation, clipping, schedulers and `save_state` are Accelerate's.
"""

from __future__ import annotations

import argparse
import argparse as source
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import gradsync as gs
from gradsync.integrations.accelerate import prepare, sync_of

LENGTH = 64


def text() -> list[torch.Tensor]:
    """A module of the standard library, as bytes, in pieces."""
    data = torch.frombuffer(bytearray(Path(source.__file__).read_bytes()), dtype=torch.uint8).long()
    return list(data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH))


def build() -> torch.nn.Module:
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", type=Path, help="where the checkpoint goes; an existing one is resumed")
    arguments = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    set_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * arguments.steps)
    loader = DataLoader(text(), batch_size=8, shuffle=True, drop_last=True)
    model, optimizer, scheduler, loader = prepare(
        accelerator, model, optimizer, scheduler, loader, plan=gs.Plan(compress=gs.int8())
    )
    if arguments.folder is not None and arguments.folder.exists():
        accelerator.load_state(str(arguments.folder))
        accelerator.print("resumed")

    steps, losses = 0, []
    while steps < arguments.steps:
        for words in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=words, labels=words).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            steps += accelerator.sync_gradients
            if steps == arguments.steps:
                break

    if arguments.folder is not None:
        accelerator.save_state(str(arguments.folder))
    stats = sync_of(model).stats()
    accelerator.print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {steps} steps")
    accelerator.print(f"{stats['steps']} synchronizations, {stats['exposed_s'] or 0:.4f} s of a step waited for them")
    sync_of(model).detach()
    accelerator.end_training()


if __name__ == "__main__":
    main()
