"""A training step from its arithmetic: parameters and operations in, a profile with ready times out.

Of a model of which only the size is known: a transformer with that many parameters, and the step it would take.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from gradsync.planner.profile import Gradient, ModelProfile

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

# Adam reads and writes two moments and the weights in fp32 (24 bytes) and reads the gradient; with 16-bit gradients it
# also writes 16-bit weights: 24 + 2 + 2, and 24 + 4 with 32-bit ones.
_ADAM_NBYTES = 28


class WeightCost(NamedTuple):
    """One parameter, and what multiplying by it costs."""

    name: str
    shape: tuple[int, ...]
    work: float  # multiply-adds of a token (or image) in the forward pass; the backward pass does twice as many

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Machine(NamedTuple):
    """The device that computes, in numbers."""

    flops: float  # the most operations per second, in this precision
    mfu: float  # the share of them that the model gets
    memory_bandwidth: float = 0.0  # bytes per second; 0: unknown, and the optimizer takes no time

    def check(self) -> None:
        if not 0 < self.flops < math.inf:
            raise ValueError(f"flops must be a positive number of operations per second, got {self.flops!r}")
        if not 0 < self.mfu <= 1:
            raise ValueError(
                f"mfu must be a share of the device's peak, over 0 and at most 1, got {self.mfu!r} (0.45 is 45 %)"
            )
        if not 0 <= self.memory_bandwidth < math.inf:
            raise ValueError(
                f"memory_bandwidth must be a number of bytes per second, 0 if unknown, got {self.memory_bandwidth!r}"
            )


def matrix(name: str, *shape: int) -> WeightCost:
    """A weight that every token is multiplied by, element by element once."""
    return WeightCost(name, shape, math.prod(shape))


def vector(name: str, *shape: int) -> WeightCost:
    """A weight that is added or looked up: next to the matrices, no work."""
    return WeightCost(name, shape, 0.0)


def step(
    weights: Sequence[WeightCost],
    operations: float,
    machine: Machine,
    dtype: str,
    tokens: float,
    tied_work: float = 0.0,
    name: str = "",
) -> ModelProfile:
    """The step of a model with these weights, in the order of its forward pass.

    Backward goes the other way round, and a gradient is ready when the work down to its layer is done:

        forward    ├─ embedding ─┼─ block 0 ─┼─ block 1 ─┼─ head ─┤
        backward   ├─ head ─┼─── block 1 ───┼─── block 0 ───┼─ embedding ─┤
                            ↑ its gradients are ready here

    Args:
        weights: All of them.
        operations: Of forward and backward together, for one token: 6 per parameter in a transformer.
        machine: What computes.
        dtype: Of the gradients: "fp16", "bf16" or "fp32".
        tokens: Of one rank in one step (images, for a model of images).
        tied_work: Multiply-adds of a head that shares its weight with the embedding: done first in backward, although
            the gradient is ready last.
        name: For people.
    """
    machine.check()
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)} (it is that of the gradients), got {dtype!r}")
    if not 0 < tokens < math.inf:
        raise ValueError(f"tokens must be a positive number (of one rank in one step), got {tokens!r}")
    compute_s = operations * tokens / (machine.flops * machine.mfu)
    backward_s = compute_s * 2 / 3
    numel = sum(weight.numel for weight in weights)
    whole = tied_work + sum(weight.work for weight in weights)
    gradients, done = [], tied_work
    for weight in reversed(weights):
        done += weight.work
        gradients.append(Gradient(weight.name, weight.shape, DTYPES[dtype], backward_s * min(1.0, done / whole)))
    return ModelProfile(
        gradients=tuple(gradients),
        forward_s=compute_s / 3,
        backward_s=backward_s,
        optimizer_s=_ADAM_NBYTES * numel / machine.memory_bandwidth if machine.memory_bandwidth else 0.0,
        tokens=tokens,
        source="described",
        name=name,
    )


_LEAST_PARAMS = 10_000
_VOCABULARY = 32_000  # less where that would be more than a third of the model
_WIDTH_PER_LAYER = 96  # between GPT-2 (64) and the largest (128)


class TransformerShape(NamedTuple):
    """The sizes of a transformer's matrices."""

    layers: int
    width: int
    hidden: int
    vocabulary: int


def describe(
    params: float = 1e9,
    dtype: str = "fp32",
    tokens: float = 8192,
    flops: float = 312e12,
    mfu: float = 0.45,
    layers: int | None = None,
    name: str = "",
    memory_bandwidth: float = 0.0,
) -> ModelProfile:
    """The step of a transformer with `params` parameters: 6 · params · tokens operations, two thirds in backward.

    Its matrices have the shapes that one of this size would have, and its gradients come in the order of backward: last
    block first, the embedding, which is also the head, at the end. The number of parameters is met to half a row of
    the embedding: the hidden layers take what blocks and embedding leave, and the vocabulary the rest.

    Args:
        params: How many parameters.
        dtype: Of the gradients: "fp32", which is what autocast leaves; "bf16" or "fp16" if the parameters are.
        tokens: Of one rank in one step, all micro-batches together.
        flops: The most operations per second of the device, in what it computes in; by default an A100's in 16 bits.
        mfu: The share of these that the model gets (model FLOPs utilization).
        layers: How many blocks; None: as many as models of this size have.
        name: For people.
        memory_bandwidth: Bytes per second of the device's memory, for the time of Adam's step; 0: leave it out.

    >>> profile = describe(params=1e9, tokens=8192, flops=312e12, mfu=0.45)
    >>> round(profile.compute_s * 1e3), round(profile.nbytes / 1e6), profile.gradients[-1].name
    (350, 4000, 'embedding')
    """
    machine = Machine(flops, mfu, memory_bandwidth)
    shape = shape_of(params, layers)
    weights = list(_weights(shape))
    return step(
        weights,
        operations=6 * params,
        machine=machine,
        dtype=dtype,
        tokens=tokens,
        tied_work=shape.vocabulary * shape.width,
        name=name or f"{_short(params)} parameters",
    )


def shape_of(params: float, layers: int | None = None) -> TransformerShape:
    """Depth, width and vocabulary of a transformer with so many parameters.

    >>> shape_of(1e9)
    TransformerShape(layers=21, width=1920, hidden=7792, vocabulary=32246)
    """
    if not _LEAST_PARAMS <= params < math.inf:
        raise ValueError(
            f"params must be a number of at least {_LEAST_PARAMS} (1e9 is a billion parameters), got {params!r}"
        )
    if layers is not None and (isinstance(layers, bool) or not isinstance(layers, int) or layers < 1):
        raise ValueError(f"layers must be a whole number of at least 1, or None to choose one, got {layers!r}")
    typical = (params * _WIDTH_PER_LAYER / 12) ** (1 / 3)
    in_blocks = params - min(params / 3, _VOCABULARY * typical)
    depth = layers or max(1, round(typical / _WIDTH_PER_LAYER))
    # A block is 4 width² of attention and 8 width² of hidden layer, as a rule.
    widest = math.sqrt(in_blocks / (12 * depth))
    if widest < 8:
        most = math.floor(in_blocks / (12 * 8 * 8))
        raise ValueError(f"layers must be at most {most} in a model of {_short(params)} parameters, got {layers}")
    grain = 64 if widest >= 512 else 8
    # Half a row of the embedding is what the total may be off by: at most a thousandth, also of a tiny model.
    width = math.floor(min(widest, params / 500) / grain) * grain
    vocabulary = min(params / 3 / width, _VOCABULARY)
    around = (4 * width + 2) * width * depth + width
    hidden = max(8, math.floor((params - around - vocabulary * width) / (2 * width * depth) / 8) * 8)
    left = params - around - 2 * width * hidden * depth
    return TransformerShape(depth, width, hidden, max(1, round(left / width)))


def _weights(shape: TransformerShape) -> Iterator[WeightCost]:
    """The weights in the order of the forward pass."""
    width, hidden = shape.width, shape.hidden
    yield vector("embedding", shape.vocabulary, width)
    for index in range(shape.layers):
        block = f"blocks.{index}"
        yield vector(f"{block}.norm1", width)
        yield matrix(f"{block}.attention.qkv", 3 * width, width)
        yield matrix(f"{block}.attention.out", width, width)
        yield vector(f"{block}.norm2", width)
        yield matrix(f"{block}.mlp.up", hidden, width)
        yield matrix(f"{block}.mlp.down", width, hidden)
    yield vector("norm", width)


def _short(params: float) -> str:
    """A number of parameters as people say it.

    >>> _short(1e9), _short(1.24e8), _short(7e3)
    ('1B', '124M', '7K')
    """
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if params >= size:
            return f"{params / size:.3g}{unit}"
    return f"{params / 1e3:.3g}K"
