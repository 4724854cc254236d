"""The flat layout of everything that travels: gradients, parameters, DDP's buckets; and the memory for it.

tensors       a  b  c  d         each has an item: its name and its form
pack_items    {a, c}  {b, d}     which travel together: of one dtype, device and choice, up to a limit of bytes
lay_out       │ a │ c │          where each begins in a flat tensor of that form
allocate      flat               `carve` in the team's memory if it is summed there, so that no copy is needed;
                                 else `zeros`
FlatBucket    flat and items     what travels, with what its compressor keeps for it between steps
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import compress
from typing import NamedTuple

import torch

from gradsync.compress.blocks import align
from gradsync.compress.param import Param, Span
from gradsync.compress.recipe import EXACT, Choice
from gradsync.errors import NotEnoughMemory
from gradsync.kernels.block_kernels import ALIGN_NBYTES
from gradsync.plan.packing import pack
from gradsync.trace.tally import CodecSpan
from gradsync.transport.shared_memory import Team

_ITEM_NBYTES = 64  # on borders of so many an item begins
_PAGE_NBYTES = 4096

Choose = Callable[[Param], Choice]


class Form(NamedTuple):
    """A flat tensor to be."""

    numel: int
    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> tuple[int]:
        return (self.numel,)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def zeros(self) -> torch.Tensor:
        """Zeros of this form, in ordinary memory."""
        return torch.zeros(self.numel, dtype=self.dtype, device=self.device)


Allocate = Callable[[list[Form]], list[torch.Tensor]]


class Item(NamedTuple):
    """One tensor's place in a flat tensor."""

    name: str
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, name: str, tensor: torch.Tensor) -> Item:
        """An item at the beginning, with the tensor's own strides; where these leave holes, with such as do not."""
        strides = torch.empty_like(tensor, device="meta").stride()
        return cls(name, 0, tuple(tensor.shape), strides, tensor.dtype, tensor.device)

    @classmethod
    def by_rows(cls, name: str, tensor: torch.Tensor) -> Item:
        """An item at the beginning, row by row: alike on two ranks whose tensors have other strides."""
        strides = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").stride()
        return cls(name, 0, tuple(tensor.shape), strides, tensor.dtype, tensor.device)

    @property
    def param(self) -> Param:
        """The parameter that a compressor is told of: the dimension with the largest stride first, as in memory."""
        order = sorted(range(len(self.shape)), key=lambda dim: -self.strides[dim])
        return Param(self.name, tuple(self.shape[dim] for dim in order), self.dtype)

    @property
    def span(self) -> Span:
        return Span(self.name, self.start, self.param.numel)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The item's part of `flat`, in the tensor's own shape."""
        return flat.as_strided(self.shape, self.strides, flat.storage_offset() + self.start)


class FlatLayout(NamedTuple):
    """Items of one dtype and device, and the flat tensor that has room for them."""

    items: list[Item]
    form: Form


def lay_out(items: Sequence[Item], align_nbytes: int = _ITEM_NBYTES) -> FlatLayout:
    """Put items one after the other; each begins at a multiple of `align_nbytes`, 1: without gaps.

    >>> items = [Item.like(name, torch.zeros(2, 3)) for name in ("weight", "bias")]
    >>> [item.start for item in lay_out(items).items], lay_out(items).form.numel, lay_out(items, 1).form.numel
    ([0, 16], 32, 12)
    """
    dtype, device = items[0].dtype, items[0].device
    step = max(1, align_nbytes // dtype.itemsize)
    placed, end = [], 0
    for item in items:
        placed.append(item._replace(start=end))
        end += align(item.param.numel, step)
    return FlatLayout(placed, Form(end, dtype, device))


def pack_items(items: Sequence[Item], limit: float, choose: Choose) -> list[tuple[list[int], Choice]]:
    """Return which items travel together, by number: of one dtype, device and choice, closed when at `limit` bytes.

    PowerSGD takes like shapes that lie together as one batch, so what is compressed is sorted by shape.
    """
    params = [item.param for item in items]
    kinds = [(item.dtype, item.device, choose(param)) for item, param in zip(items, params, strict=True)]
    packed = pack(zip(kinds, (param.nbytes for param in params), strict=True), limit)
    return [
        (numbers if choice.codec is None else sorted(numbers, key=lambda number: items[number].shape), choice)
        for numbers, (_, _, choice) in packed
    ]


def cut_bytes(
    memory: torch.Tensor, forms: Sequence[Form | torch.Tensor], align_nbytes: int = ALIGN_NBYTES
) -> list[torch.Tensor]:
    """Views of bytes as tensors of these forms, row by row, one after the other, each beginning on such a border."""
    views, begin = [], 0
    for form in forms:
        views.append(memory[begin : begin + form.nbytes].view(form.dtype).view(form.shape))
        begin += align(form.nbytes, align_nbytes)
    return views


def sum_nbytes(forms: Sequence[Form | torch.Tensor], align_nbytes: int = ALIGN_NBYTES) -> int:
    """Return how many bytes `cut_bytes` needs for these."""
    return sum(align(form.nbytes, align_nbytes) for form in forms)


def zeros(forms: list[Form]) -> list[torch.Tensor]:
    """Zeros of these forms, in ordinary memory."""
    return [form.zeros() for form in forms]


def carve(team: Team, forms: list[Form], shared: list[bool]) -> list[torch.Tensor]:
    """Zeros; those marked `shared` in one piece of the team's memory, if there is enough."""
    inside = list(compress(forms, shared))
    try:
        memory = team.allocate(sum_nbytes(inside, _PAGE_NBYTES))
    except NotEnoughMemory as error:
        warnings.warn(f"{error}; gradients are staged through a small window instead", stacklevel=7)
        return zeros(forms)
    parts = iter(cut_bytes(memory, inside, _PAGE_NBYTES))
    return [next(parts) if here else form.zeros() for form, here in zip(forms, shared, strict=True)]


class FlatBucket:
    """The gradients that travel together, and what their compressor keeps for them between steps."""

    def __init__(self, index: int, flat: torch.Tensor, items: list[Item], choice: Choice = EXACT) -> None:
        self.index = index
        self.flat = flat
        self.items = items
        self.choice = choice
        self.residual: torch.Tensor | None = None  # what was not sent yet: fp32, laid out as `flat`
        self.factors: dict[str, torch.Tensor] = {}  # what else its codec keeps, by parameter: PowerSGD's Q
        self.spans: list[CodecSpan] = []  # what its compressor did in this step, and when

    def begin_keeping(self) -> None:
        """Have what its compressor keeps, as before the first step where it is not there yet."""
        codec = self.choice.codec
        if self.residual is None and self.choice.feedback:
            self.residual = torch.zeros_like(self.flat, dtype=torch.float32)
        for item in self.items:
            if item.name not in self.factors and codec is not None and (start := codec.start(item.param)) is not None:
                self.factors[item.name] = start.to(self.flat.device)

    def keep_with(self, other: FlatBucket | None) -> None:
        """Keep what another one keeps; None: nothing yet."""
        self.residual, self.factors = (None, {}) if other is None else (other.residual, other.factors)

    def begin_step(self) -> None:
        """A step's rounds begin."""
        self.spans = []

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    @cached_property
    def raw_nbytes(self) -> int:
        """The bytes that its items take, without the gaps between them."""
        return sum(item.param.nbytes for item in self.items)

    @property
    def payload_nbytes(self) -> int:
        """The bytes that one rank's payload takes, as its compressor claims."""
        if self.choice.codec is None:
            return self.nbytes
        return sum(self.choice.nbytes(item.param) for item in self.items)

    @property
    def what(self) -> str:
        return f"bucket {self.index}"

    def describe(self) -> str:
        """Say what the bucket is, for people, with the first names."""
        names = [item.name for item in self.items]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return f"{self.what} ({shown})"


def make_flat_buckets(
    layouts: Sequence[tuple[FlatLayout, Choice]], indices: Iterable[int], allocate: Allocate
) -> list[FlatBucket]:
    """A flat bucket for each layout, with the next of the `indices`; every rank makes them at once."""
    flats = allocate([layout.form for layout, _ in layouts])
    return [
        FlatBucket(index, flat, layout.items, choice)
        # The indices come last: of a count, none is taken that nothing is made with.
        for flat, (layout, choice), index in zip(flats, layouts, indices, strict=False)
    ]
