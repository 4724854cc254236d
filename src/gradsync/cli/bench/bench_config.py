"""The measurements to be made, as data that travels to every rank as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, NamedTuple

import torch

WARM, COLD = "warm", "cold"

DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
}


class Setting(NamedTuple):
    """The circumstances under which a size is measured."""

    cache: str
    busy: bool


@dataclass(frozen=True)
class BenchConfig:
    """Every size under every setting, by all arms in turn.

    >>> config = BenchConfig((1024,), "fp32", ("gloo",))
    >>> BenchConfig.from_json(config.as_json()) == config
    True
    """

    sizes: tuple[int, ...]
    dtype: str
    arms: tuple[str, ...]
    caches: tuple[str, ...] = (WARM,)
    busy: tuple[bool, ...] = (False,)
    rounds: int | None = None  # None: as many as fit into the time
    device: str = "cpu"

    @property
    def num_comparisons(self) -> int:
        return len(self.sizes) * len(self.caches) * len(self.busy)

    def settings(self) -> Iterator[Setting]:
        return (Setting(cache, busy) for busy, cache in product(self.busy, self.caches))

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> BenchConfig:
        fields: dict[str, Any] = json.loads(text)
        for name, value in fields.items():
            if isinstance(value, list):
                fields[name] = tuple(value)
        return cls(**fields)
