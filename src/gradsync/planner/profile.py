"""What a model asks of synchronization: gradients in the order of backward, and when each is ready."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from gradsync import tables
from gradsync.compress.param import Param
from gradsync.planner import profile_file


class Gradient(NamedTuple):
    """One parameter's, as backward makes it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    ready_s: float  # since backward began

    @property
    def param(self) -> Param:
        return Param(self.name, self.shape, self.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ModelProfile:
    """A training step of one rank, without synchronization, on a core or GPU of its own.

    Where ranks share cores it takes longer, which is the cluster's business (`Device.cores`).

    Args:
        gradients: In the order in which they are ready.
        forward_s: Seconds of the forward pass.
        backward_s: Of the backward pass.
        optimizer_s: Of the optimizer's step.
        input_s: Of everything else in a step: loading data, logging.
        tokens: Of one rank in one step (samples, if the model has none); what a larger batch is measured against.
        jitter: Relative standard deviation of the whole, from step to step; None: the device's.
        source: "measured" on a real model, or "described" in numbers.
        name: For people.

    >>> profile = ModelProfile((Gradient("w", (10, 10), torch.float32, 0.02),), 0.01, 0.02, 0.005)
    >>> profile.nbytes, round(profile.compute_s, 6)
    (400, 0.035)
    """

    gradients: tuple[Gradient, ...]
    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0
    input_s: float = 0.0
    tokens: float = 1.0
    jitter: float | None = None
    source: Literal["measured", "described"] = "measured"
    name: str = ""

    def __post_init__(self) -> None:
        if not self.gradients:
            raise ValueError("ModelProfile: there must be at least one gradient, got none")
        for name in ("forward_s", "backward_s", "optimizer_s", "input_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"ModelProfile: {name} must be a number of seconds, 0 or more, got {value!r}")
        if not 0 < self.tokens < math.inf:
            raise ValueError(f"ModelProfile: tokens must be a positive number, got {self.tokens!r}")
        if self.jitter is not None and not 0 <= self.jitter < math.inf:
            raise ValueError(f"ModelProfile: jitter must be a relative deviation, 0 or more, got {self.jitter!r}")
        if self.source not in ("measured", "described"):
            raise ValueError(f'ModelProfile: source must be "measured" or "described", got {self.source!r}')
        ready = [gradient.ready_s for gradient in self.gradients]
        if ready != sorted(ready) or ready[0] < 0:
            raise ValueError("ModelProfile: gradients must stand in the order in which they are ready")

    @property
    def nbytes(self) -> int:
        """Of all gradients."""
        return sum(gradient.nbytes for gradient in self.gradients)

    @property
    def num_params(self) -> int:
        return sum(math.prod(gradient.shape) for gradient in self.gradients)

    @property
    def compute_s(self) -> float:
        """A step without synchronization."""
        return self.input_s + self.forward_s + self.backward_s + self.optimizer_s

    def save(self, path: str | Path) -> None:
        """Write the profile as TOML."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "gradients"}
        profile_file.write(path, values, self.gradients)

    @classmethod
    def load(cls, path: str | Path) -> ModelProfile:
        """Read a profile from TOML."""
        values, rows = profile_file.read(path)
        return tables.make(str(path), cls, gradients=tuple(Gradient(*row) for row in rows), **values)
