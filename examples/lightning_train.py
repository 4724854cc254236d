"""A LightningModule trained with gradsync on two ranks of this machine.

    python examples/lightning_train.py                     # Lightning starts the second rank
    torchrun --standalone --nproc-per-node 2 examples/lightning_train.py
    python examples/lightning_train.py --compress --trace run && gradsync report run

The only line that is gradsync's is the `strategy`. Run it again with `--resume` and more `--epochs`: it goes on from
the checkpoint, and what compression had not sent yet is in there too.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import gradsync as gs
from gradsync.integrations.lightning import GradSyncStrategy


class Classifier(L.LightningModule):
    """Which of four weight vectors fits a point best? A small network learns it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 4))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = cross_entropy(self.net(x), y)
        self.log("loss", loss, prog_bar=True)
        self.log_dict(self.trainer.strategy.stats())  # what synchronization costs, beside the loss
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        x, y = batch
        self.log("val_loss", cross_entropy(self.net(x), y), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def data(num: int, seed: int) -> DataLoader[Any]:
    teacher = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    x = torch.randn(num, 32, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, (x @ teacher).argmax(1)), batch_size=64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("lightning_run"), help="where checkpoints go")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--compress", action="store_true", help="send gradients in 8 bits")
    parser.add_argument("--trace", help="a folder for gradsync report")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the folder")
    arguments = parser.parse_args()

    L.seed_everything(0, verbose=False)
    plan = gs.Plan(compress=gs.int8() if arguments.compress else None)
    trainer = L.Trainer(
        strategy=GradSyncStrategy(plan, trace=arguments.trace),
        accelerator="cpu",
        devices=arguments.devices,
        max_epochs=arguments.epochs,
        gradient_clip_val=1.0,
        callbacks=[
            L.pytorch.callbacks.ModelCheckpoint(arguments.folder, filename="last", enable_version_counter=False)
        ],
        logger=False,
        enable_progress_bar=False,
    )
    last = arguments.folder / "last.ckpt"
    trainer.fit(Classifier(), data(2048, 1), data(512, 2), ckpt_path=last if arguments.resume else None)
    if trainer.is_global_zero:
        stats = trainer.strategy.sync.stats()
        if "val_loss" not in trainer.callback_metrics:
            print(f"nothing to do: {last} ends epoch {trainer.current_epoch}; pass more --epochs to go on")
            return
        print(f"val_loss {trainer.callback_metrics['val_loss']:.4f}, {stats['steps']} steps, ", end="")
        print(f"{1000 * stats['exposed_s']:.2f} ms of each for synchronization")


if __name__ == "__main__":
    main()
