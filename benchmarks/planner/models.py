"""Two models that ask for different things: many small matrices and much to compute, a few large ones and little."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from gradsync.cli.demo.story.corpus import VOCABULARY
from gradsync.cli.demo.story.demo_model import CharTransformer, DemoShape, loss_of

_SHAPE = DemoShape(layers=4, width=192, heads=6, context=64, batch=4)
_PIXELS, _WIDTH, _CLASSES, _IMAGES = 64, 896, 10, 512


class Training(NamedTuple):
    """A replica that trains on noise: the time of a step does not depend on what is learned."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], None]


def transformer(rank: int) -> Training:
    """1.8 million parameters, the demo's."""
    torch.manual_seed(0)
    model = CharTransformer(_SHAPE)
    text = torch.randint(VOCABULARY, (_SHAPE.batch, _SHAPE.context), generator=torch.Generator().manual_seed(rank))
    return _training(model, lambda: loss_of(model, (text, text)))


def perceptron(rank: int) -> Training:
    """1.7 million parameters, nearly all of them in two square matrices."""
    torch.manual_seed(0)
    sizes = (_PIXELS, _WIDTH, _WIDTH, _WIDTH, _CLASSES)
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    draw = torch.Generator().manual_seed(rank)
    images = torch.randn(_IMAGES, _PIXELS, generator=draw)
    classes = torch.randint(_CLASSES, (_IMAGES,), generator=draw)
    return _training(model, lambda: nn.functional.cross_entropy(model(images), classes))


def _training(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Training:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, optimizer, step)


MODELS: dict[str, Callable[[int], Training]] = {"transformer": transformer, "perceptron": perceptron}
