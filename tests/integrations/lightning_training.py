"""The same short training of a LightningModule under Lightning's DDPStrategy and under ours, in the ranks of a test."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

Weights = dict[str, torch.Tensor]


class Here(ClusterEnvironment):
    """The ranks that the test has started already."""

    creates_processes_externally = True
    main_address, main_port = "127.0.0.1", 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_world_size(self, size: int) -> None: ...
    def set_global_rank(self, rank: int) -> None: ...

    def local_rank(self) -> int:
        return dist.get_rank()

    def node_rank(self) -> int:
        return 0


class Plain(pl.LightningModule):
    """BatchNorm, a branch that only rank 1 uses, parts that are called one by one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5 + (dist.get_rank() if dist.is_initialized() else 0))  # ranks begin as rank 0
        self.body = nn.Sequential(nn.Linear(8, 33), nn.BatchNorm1d(33), nn.ReLU(), nn.Linear(33, 4))
        self.extra = nn.Linear(8, 4)
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        scores = self.body(x)
        if self.global_rank == 1 or self.trainer.world_size == 1:
            scores = scores + self.extra(x)
        loss = cross_entropy(scores, y)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        x, y = batch
        self.log("loss", cross_entropy(self.body(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Pair(Plain):
    """Manual optimization: two optimizers take turns, and the second accumulates two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:  # type: ignore[override]
        x, y = batch
        first, second = self.optimizers()
        with first.toggle_model():
            self.manual_backward(cross_entropy(self.body(x), y))
            self.clip_gradients(first, gradient_clip_val=0.5)
            first.step()
            first.zero_grad()
        full = index % 2 == 1
        with second.toggle_model(sync_grad=full):
            self.manual_backward(cross_entropy(self.body(x).detach() + self.extra(x), y) / 2)
            if full:
                second.step()
                second.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.body.parameters(), lr=0.1), torch.optim.AdamW(self.extra.parameters(), lr=1e-2)


def loader(num: int = 96) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(num, 8, generator=generator), torch.randint(0, 4, (num,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=8)


def trainer(strategy: Any, **options: Any) -> pl.Trainer:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    # Lightning's own: our ranks may warn, and are heard.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": dist.get_world_size(),
        "max_epochs": 2,
        "num_sanity_val_steps": 0,
        "plugins": [Here()],
    }
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(strategy=strategy, **settings | quiet | {"enable_checkpointing": False} | options)


def fit(strategy: Any, module: Callable[[], Plain] = Plain, **options: Any) -> Plain:
    """The module that a whole training leaves."""
    model = module()
    trainer(strategy, **options).fit(model, loader(), loader(16))
    return model


def weights(model: nn.Module) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_equal(ours: Weights, theirs: Weights, what: object = "") -> None:
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), f"{name} {what}"


def assert_replicas_equal(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        all_of_them = [torch.empty_like(param) for _ in range(dist.get_world_size())]
        dist.all_gather(all_of_them, param.detach())
        assert all(torch.equal(each, all_of_them[0]) for each in all_of_them), name
