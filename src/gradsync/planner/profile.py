"""The demand of a model on synchronization: gradients in the order of backward, and when each is ready.

A profile's file holds a table of times, and below it one of each gradient, in the order of backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from gradsync import tables
from gradsync.compress.param import Param


class Gradient(NamedTuple):
    """The gradient of one parameter, as backward makes it."""

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
        host_s: Of the host, to issue a step to a GPU that it does not wait for; None: it is far ahead, or there is no
            GPU.

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
    host_s: float | None = None

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
        if self.host_s is not None and not 0 <= self.host_s < math.inf:
            raise ValueError(f"ModelProfile: host_s must be a number of seconds, 0 or more, got {self.host_s!r}")
        if self.source not in ("measured", "described"):
            raise ValueError(f'ModelProfile: source must be "measured" or "described", got {self.source!r}')
        ready = [gradient.ready_s for gradient in self.gradients]
        if ready != sorted(ready) or ready[0] < 0:
            raise ValueError("ModelProfile: gradients must stand in the order in which they are ready")

    @property
    def nbytes(self) -> int:
        """The bytes of all gradients."""
        return sum(gradient.nbytes for gradient in self.gradients)

    @property
    def num_params(self) -> int:
        return sum(math.prod(gradient.shape) for gradient in self.gradients)

    @property
    def compute_s(self) -> float:
        """A step without synchronization."""
        return max(self.device_s, self.host_s or 0.0)

    @property
    def device_s(self) -> float:
        """A step without synchronization, of a device that never waits for its host."""
        return self.input_s + self.forward_s + self.backward_s + self.optimizer_s

    def save(self, path: str | Path) -> None:
        """Write the profile as TOML."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "gradients"}
        _write(path, values, self.gradients)

    @classmethod
    def load(cls, path: str | Path) -> ModelProfile:
        """Read a profile from TOML."""
        values, gradients = _read(path)
        return tables.make(str(path), cls, gradients=tuple(gradients), **values)


_COMMENT = "A gradsync model profile: gs.ModelProfile.load(path)"
_NUMBERS = ("forward_s", "backward_s", "optimizer_s", "input_s", "tokens", "jitter", "host_s")
_FIELDS = ("name", "source", *_NUMBERS, "gradients")
_ROW_FIELDS = ("name", "shape", "dtype", "ready_s")
_SECONDS = "a number of seconds since backward began, 0 or more"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _FLOATS}


def _write(path: str | Path, values: Mapping[str, Any], rows: Sequence[Gradient]) -> None:
    """A profile's fields and its gradients as TOML; a field that is None is left out."""
    table = {name: value for name, value in values.items() if value is not None}
    gradients = [
        {"name": name, "shape": list(shape), "dtype": str(dtype).removeprefix("torch."), "ready_s": ready_s}
        for name, shape, dtype, ready_s in rows
    ]
    tables.write(path, _COMMENT, {**table, "gradients": gradients})


def _read(path: str | Path) -> tuple[dict[str, Any], list[Gradient]]:
    """The fields and the gradients of a file, each of the right type."""
    where = str(path)
    table = tables.check_fields(where, "profile", tables.read(path), _FIELDS, ("forward_s", "backward_s", "gradients"))
    for name in _NUMBERS:
        tables.check_kind(where, table, name, (int, float), "a number")
    for name in ("name", "source"):
        tables.check_kind(where, table, name, str, "a word in quotes")
    tables.check_kind(where, table, "gradients", list, "a list of tables, each under [[gradients]]")
    rows = [_gradient_of(f"{where}: gradient {index}", item) for index, item in enumerate(table["gradients"])]
    return {name: value for name, value in table.items() if name != "gradients"}, rows


def _gradient_of(where: str, item: object) -> Gradient:
    table = tables.check_fields(where, "gradient", item, _ROW_FIELDS, _ROW_FIELDS)
    tables.check_kind(where, table, "name", str, "a word in quotes")
    tables.check_kind(where, table, "ready_s", (int, float), _SECONDS)
    if not 0 <= table["ready_s"] < math.inf:
        raise ValueError(f"{where}: ready_s must be {_SECONDS}, got {table['ready_s']!r}")
    shape, dtype = table["shape"], table["dtype"]
    if not isinstance(shape, list) or not all(type(side) is int and side >= 0 for side in shape):
        raise ValueError(f"{where}: shape must be a list of whole numbers, 0 or more, got {shape!r}")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"{where}: dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    return Gradient(table["name"], tuple(shape), _DTYPES[dtype], table["ready_s"])
