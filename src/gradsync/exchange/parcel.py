"""A bucket as the exchange sees it: a flat tensor, whose parameters lie where, and how they are to travel."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch

from gradsync.compress.blocks import Span as Stretch
from gradsync.compress.choice import EXACT, Choice, Param
from gradsync.trace.tally import Span


class Item(NamedTuple):
    """One parameter's gradient in a flat tensor."""

    name: str
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def param(self) -> Param:
        """As it lies in memory: the dimension with the largest stride is the first."""
        order = sorted(range(len(self.shape)), key=lambda dim: -self.strides[dim])
        return Param(self.name, tuple(self.shape[dim] for dim in order))

    @property
    def span(self) -> Stretch:
        return Stretch(self.name, self.start, self.param.numel)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Its part of `flat`, in the parameter's own shape."""
        return flat.as_strided(self.shape, self.strides, flat.storage_offset() + self.start)


class Parcel:
    """What travels together, and what its compressor keeps for it between steps."""

    def __init__(self, index: int, flat: torch.Tensor, items: list[Item], choice: Choice = EXACT) -> None:
        self.index = index
        self.flat = flat
        self.items = items
        self.choice = choice
        self.residual: torch.Tensor | None = None  # what was not sent yet: fp32, laid out as `flat`
        self.factors: dict[str, torch.Tensor] = {}  # PowerSGD's Q, by parameter: where the next step begins
        self.spans: list[Span] = []  # what its compressor did on this journey, and when

    @property
    def nbytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()

    @cached_property
    def raw_nbytes(self) -> int:
        """What its gradients take, without the gaps between them."""
        return sum(item.param.numel for item in self.items) * self.flat.element_size()

    @property
    def payload_nbytes(self) -> int:
        """What one rank's payload takes, as its compressor claims."""
        if self.choice.codec is None:
            return self.nbytes
        return sum(self.choice.nbytes(item.param._replace(dtype=self.flat.dtype)) for item in self.items)

    @property
    def what(self) -> str:
        return f"bucket {self.index}"
