"""What is trained: a GPT, and stacks of linear layers. Each gives its loss, from a batch that the rank draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

_SEQUENCES = 16  # whose logits exist at the same time


class Shape(NamedTuple):
    """Of a GPT."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int


class Block(nn.Module):
    """Attention and a multilayer perceptron, each after a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.queries(self.before_attention(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """GPT-2, its embedding shared with its head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.blocks(self.tokens(ids) + self.places.weight[: ids.shape[1]]))[:, :-1]
        goals = ids[:, 1:]
        # Logits of a large batch at once would not fit into the memory of a GPU that ranks share.
        parts = [
            nn.functional.cross_entropy(
                nn.functional.linear(some, self.tokens.weight).flatten(0, 1), wanted.flatten(), reduction="sum"
            )
            for some, wanted in zip(x.split(_SEQUENCES), goals.split(_SEQUENCES), strict=True)
        ]
        return sum(parts[1:], parts[0]) / goals.numel()


class Chain(nn.Module):
    """Square linear layers, one after the other."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


class Workload(NamedTuple):
    """A model, and a batch of it."""

    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], torch.Tensor]
    autocast: bool


def _gpt(shape: Shape, batch: int) -> Workload:
    size = (batch, shape.context)
    return Workload(lambda: GPT(shape), lambda g: torch.randint(shape.vocabulary, size, generator=g), True)


def _chain(depth: int, width: int, batch: int) -> Workload:
    return Workload(lambda: Chain(depth, width), lambda g: torch.randn(batch, width, generator=g), False)


GPT_124M = Shape(12, 768, 12, 50257, 1024)
GPT_30M = Shape(6, 512, 8, 20000, 512)
_TINY = Shape(2, 32, 4, 97, 16)


def workload(name: str, dry: bool) -> Workload:
    """By name; `dry`: so small that it takes no time."""
    kind, _, batch = name.partition(" batch ")
    if kind.startswith("GPT"):
        shape = _TINY if dry else {"GPT 124 M": GPT_124M, "GPT 30 M": GPT_30M}[kind]
        return _gpt(shape, 2 if dry else int(batch))
    depth, width = {"few large": (6, 2048), "1000 small": (500, 16), "wide": (8, 2048)}[kind]
    return _chain(3 if dry else depth, 16 if dry else width, int(batch))
