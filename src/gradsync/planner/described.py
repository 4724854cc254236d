"""A model of which only the size is known: a transformer with that many parameters, and the step it would take."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from gradsync.planner.arithmetic import Machine, Weight, matrix, step, vector
from gradsync.planner.profile import ModelProfile

_LEAST_PARAMS = 10_000
_VOCABULARY = 32_000  # less where that would be more than a third of the model
_WIDTH_PER_LAYER = 96  # between GPT-2 (64) and the largest (128)


class Shape(NamedTuple):
    """Of a transformer: what the matrices measure."""

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


def shape_of(params: float, layers: int | None = None) -> Shape:
    """Depth, width and vocabulary of a transformer with so many parameters.

    >>> shape_of(1e9)
    Shape(layers=21, width=1920, hidden=7792, vocabulary=32246)
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
    return Shape(depth, width, hidden, max(1, round(left / width)))


def _weights(shape: Shape) -> Iterator[Weight]:
    """In the order of the forward pass."""
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
    """As people say it.

    >>> _short(1e9), _short(1.24e8), _short(7e3)
    ('1B', '124M', '7K')
    """
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if params >= size:
            return f"{params / size:.3g}{unit}"
    return f"{params / 1e3:.3g}K"
