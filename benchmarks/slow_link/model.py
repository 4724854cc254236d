"""The model: the demo's transformer, in two sizes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from gradsync.cli.demo.story.demo_model import CharTransformer, DemoShape, loss_of

SIZES = {
    "large": DemoShape(layers=6, width=384, heads=6, context=64, batch=4),  # 10.8 million parameters
    "large, batch 32": DemoShape(layers=6, width=384, heads=6, context=64, batch=32),  # the same, for a GPU
    "small": DemoShape(layers=4, width=192, heads=6, context=64, batch=4),  # 1.8 million
}


def build(shape: DemoShape, seed: int) -> CharTransformer:
    """A model whose weights are equal for a seed, in every arm and on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CharTransformer(shape)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
}
RATES = {"adamw": 1e-3, "sgd": 0.03}
"""Learning rates, the same for every arm."""


def optimizer_of(model: nn.Module, name: str = "adamw") -> torch.optim.Optimizer:
    return OPTIMIZERS[name](model.parameters(), lr=RATES[name])


@torch.no_grad()
def evaluate(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Nats per character."""
    return loss_of(model, batch).item()


def digest(model: nn.Module) -> str:
    """The digest of the weights: replicas that are equal have equal ones."""
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).cpu()
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest()
