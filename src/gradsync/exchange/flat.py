"""A bucket as the exchange sees it: a flat tensor, whose parameters lie where, and how they are to travel.

Where flat tensors live: in the team's memory if they are summed there, so that no copy is needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cached_property
from itertools import compress
from typing import NamedTuple

import torch

from gradsync.compress.blocks import Span as Stretch
from gradsync.compress.recipe import EXACT, Choice, Param
from gradsync.errors import NotEnoughMemory
from gradsync.trace.tally import CodecSpan
from gradsync.transport.shared_memory import Team


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


class FlatBucket:
    """What travels together, and what its compressor keeps for it between steps."""

    def __init__(self, index: int, flat: torch.Tensor, items: list[Item], choice: Choice = EXACT) -> None:
        self.index = index
        self.flat = flat
        self.items = items
        self.choice = choice
        self.residual: torch.Tensor | None = None  # what was not sent yet: fp32, laid out as `flat`
        self.factors: dict[str, torch.Tensor] = {}  # PowerSGD's Q, by parameter: where the next step begins
        self.spans: list[CodecSpan] = []  # what its compressor did on this journey, and when

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


_ALIGN_NBYTES = 4096


class Form(NamedTuple):
    """A flat tensor to be."""

    numel: int
    dtype: torch.dtype
    device: torch.device


Allocate = Callable[[list[Form]], list[torch.Tensor]]


def zeros(forms: list[Form]) -> list[torch.Tensor]:
    """In ordinary memory."""
    return [torch.zeros(form.numel, dtype=form.dtype, device=form.device) for form in forms]


def carve(team: Team, forms: list[Form], shared: list[bool]) -> list[torch.Tensor]:
    """Zeros; those marked `shared` in one piece of the team's memory, if there is enough."""
    inside = list(compress(forms, shared))
    sizes = [-(-form.numel * form.dtype.itemsize // _ALIGN_NBYTES) * _ALIGN_NBYTES for form in inside]
    try:
        memory = team.allocate(sum(sizes))
    except NotEnoughMemory as error:
        warnings.warn(f"{error}; gradients are staged through a small window instead", stacklevel=7)
        return zeros(forms)
    parts = iter(
        part[: form.numel * form.dtype.itemsize].view(form.dtype)
        for form, part in zip(inside, memory[: sum(sizes)].split(sizes), strict=True)
    )
    return [next(parts) if here else zeros([form])[0] for form, here in zip(forms, shared, strict=True)]
