"""The demo's model: a transformer that guesses the next character."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from gradsync.cli.demo.story.corpus import VOCABULARY


@dataclass(frozen=True)
class DemoShape:
    """The size of the model and of each rank's share of a batch, and the device that they are on."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 64
    batch: int = 8
    device: str = "cpu"


class CharTransformer(nn.Module):
    """Characters in, a score for every possible next character out."""

    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.scores = nn.Linear(shape.width, VOCABULARY)
        for embedding in (self.characters, self.places):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.scores(self.norm(self.blocks(self.characters(text) + self.places(places))))


class Block(nn.Module):
    """Look back at earlier characters, then think about each."""

    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_look = nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.join = nn.Linear(shape.width, shape.width)
        self.norm_think = nn.LayerNorm(shape.width)
        self.think = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width), nn.GELU(), nn.Linear(4 * shape.width, shape.width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.join(self._look(self.norm_look(x)))
        return x + self.think(self.norm_think(x))

    def _look(self, x: torch.Tensor) -> torch.Tensor:
        split = self.query_key_value(x).unflatten(-1, (3, self.heads, -1))  # batch, time, 3, head, width
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return seen.transpose(1, 2).flatten(2)


def build(shape: DemoShape) -> CharTransformer:
    """A model whose weights are equal at every call, on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return CharTransformer(shape).to(shape.device)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the cross-entropy of the next character under the model, in nats."""
    scores = model(batch[0])
    return functional.cross_entropy(scores.flatten(0, 1), batch[1].flatten())
