"""A training step from its arithmetic: parameters and operations in, a profile with ready times out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from gradsync.planner.profile import Gradient, ModelProfile

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

# Adam reads and writes two moments and the weights in fp32 (24 bytes) and reads the gradient; with 16-bit gradients it
# also writes 16-bit weights: 24 + 2 + 2, and 24 + 4 with 32-bit ones.
_ADAM_NBYTES = 28


class Weight(NamedTuple):
    """One parameter, and what multiplying by it costs."""

    name: str
    shape: tuple[int, ...]
    work: float  # multiply-adds of a token (or image) in the forward pass; the backward pass does twice as many

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Machine(NamedTuple):
    """What computes, in numbers."""

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


def matrix(name: str, *shape: int) -> Weight:
    """One that every token is multiplied by, element by element once."""
    return Weight(name, shape, math.prod(shape))


def vector(name: str, *shape: int) -> Weight:
    """One that is added or looked up: next to the matrices, no work."""
    return Weight(name, shape, 0.0)


def step(
    weights: Sequence[Weight],
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
