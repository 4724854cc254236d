"""A script for Lightning's launcher and for torchrun: `python lightning_death.py RANK` kills that rank in step 4.

torchrun ends the survivor of a death at once, at times before it could say whom it lost: here it may finish.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_training import Plain, loader

import gradsync as gs
from gradsync.integrations.lightning import GradSyncStrategy


class Mortal(Plain):
    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if index == 4 and self.global_rank == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, index)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    trainer = pl.Trainer(
        strategy=GradSyncStrategy(guard=gs.Guard(timeout=60)),
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Mortal(), loader())
