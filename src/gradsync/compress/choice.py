"""What a compressor decides for one parameter. Every composition of recipes comes down to one `Choice`.

    gs.warmup(gs.across_hosts(gs.int8()), 100).choose(param)
        → Choice(codec=Int8(...), feedback=True, exact_steps=100, across=True)

Parameters with equal choices travel together, so a bucket has one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch


class Param(NamedTuple):
    """A parameter's gradient, as far as a compressor needs to know it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@runtime_checkable
class Codec(Protocol):
    """How a bucket's gradients become bytes: of one of the families in `blocks`, `cast`, `randomk` and `powersgd`."""

    name: ClassVar[str]
    summable: ClassVar[bool]  # whether payloads of ranks may be added up; if not, each must be decoded

    def nbytes(self, param: Param) -> int:
        """The bytes of this parameter's payload."""

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Choice:
    """How one parameter's gradient travels."""

    codec: Codec | None = None  # None: as it is
    feedback: bool = False  # what compression loses is kept and added to the next gradient
    exact_steps: int = 0  # so many synchronizations go as they are first
    across: bool = False  # as it is inside a host, compressed across

    def nbytes(self, param: Param) -> int:
        """The bytes of one payload."""
        return param.nbytes if self.codec is None else self.codec.nbytes(param)

    @property
    def summable(self) -> bool:
        return self.codec is None or self.codec.summable

    @property
    def label(self) -> str:
        return "exact" if self.codec is None else self.codec.name


EXACT = Choice()

_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def if_real(codec: Codec, param: Param) -> Choice:
    """This codec for a gradient of real floating numbers; complex and whole numbers go as they are."""
    return Choice(codec) if param.dtype in _REAL else EXACT


@runtime_checkable
class Compressor(Protocol):
    """A recipe, as data: frozen, comparable, and nothing but numbers and words inside."""

    def choose(self, param: Param) -> Choice: ...

    def __hash__(self) -> int: ...
