"""The choice of a compressor for one parameter. Every composition of recipes comes down to one `Choice`.

    gs.warmup(gs.across_hosts(gs.int8()), 100).choose(param)
        → Choice(codec=Int8(...), feedback=True, exact_steps=100, across=True)

Parameters with equal choices travel together, so a bucket has one.

What recipes accept. A refusal is one sentence with the value and the way out.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol, TypeGuard, runtime_checkable

import torch

from gradsync.compress.param import Param
from gradsync.compress.rounds import CodedBucket, Rounds


class MemoryTraffic(NamedTuple):
    """Bytes of memory read and written per element, where nobody measured a codec.

    What is read and written, each once, for gradients of 4 bytes with error feedback.
    """

    encode: float
    decode: float
    between: float = 0.0  # where there are two rounds


class Codec(ABC):
    """The way a bucket's gradients travel: what becomes of them before, between and after its rounds. Frozen data.

    Each codec has a file of its own beside this one, with all that anybody needs to know of it.
    """

    name: ClassVar[str]  # for people, and in a probe's file
    quality: ClassVar[Literal["16-bit", "lossy"]] = "lossy"
    traffic: ClassVar[MemoryTraffic] = MemoryTraffic(12.0, 8.0)

    def choose(self, param: Param) -> Choice:
        """A codec alone is a recipe too: for real floating numbers; complex and whole ones go as they are."""
        return Choice(self) if param.dtype in _REAL else EXACT

    @abstractmethod
    def nbytes(self, param: Param) -> int:
        """The bytes of this parameter's payload."""

    @abstractmethod
    def rounds(self, bucket: CodedBucket) -> Rounds:
        """Yield what is computed and sent, in this order; at its end the bucket holds the sum over the ranks."""

    def start(self, param: Param) -> torch.Tensor | None:
        """Return what is kept for this parameter beside its residual, before the first step; equal on all ranks."""
        return None


@dataclass(frozen=True)
class Choice:
    """The way one parameter's gradient travels."""

    codec: Codec | None = None  # None: as it is
    feedback: bool = False  # what compression loses is kept and added to the next gradient
    exact_steps: int = 0  # so many synchronizations go as they are first
    across: bool = False  # as it is inside a host, compressed across

    def nbytes(self, param: Param) -> int:
        """The bytes of one payload."""
        return param.nbytes if self.codec is None else self.codec.nbytes(param)

    @property
    def label(self) -> str:
        return "exact" if self.codec is None else self.codec.name


EXACT = Choice()

_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@runtime_checkable
class Compressor(Protocol):
    """A recipe, as data: frozen, comparable, and nothing but numbers and words inside."""

    def choose(self, param: Param) -> Choice: ...

    def __hash__(self) -> int: ...


SPELLINGS = {
    "fp16": "gs.fp16()",
    "bf16": "gs.bf16()",
    "int8": "gs.int8()",
    "int4": "gs.int4()",
    "sign": "gs.sign()",
    "topk": "gs.topk(density)",
    "randomk": "gs.randomk(density)",
    "powersgd": "gs.powersgd(rank)",
    "error_feedback": "gs.error_feedback(c)",
    "warmup": "gs.warmup(c, steps)",
    "by_parameter": "gs.by_parameter(rules)",
    "across_hosts": "gs.across_hosts(c)",
}
MAX_WHOLE = (1 << 31) - 1
MAX_SEED = (1 << 32) - 1


def check_whole(what: str, value: object, low: int, high: int = MAX_WHOLE) -> None:
    """Refuse what is not a whole number from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{what} must be a whole number from {low} to {high}, got {value!r}")


def check_block(what: str, value: object, low: int, high: int) -> None:
    """Refuse what is not a power of two from `low` to `high`."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high or value & (value - 1):
        raise ValueError(f"{what}: block must be a power of two from {low} to {high} (elements), got {value!r}")


def check_density(what: str, value: object) -> None:
    """Refuse what is not a share."""
    if not is_number(value) or not 0 < float(value) <= 1:
        raise ValueError(
            f"{what}: density must be above 0 and at most 1, got {value!r} (the share that is sent: 0.01 is 1 %)"
        )


def check_compressor(what: str, value: object) -> None:
    """Refuse what is no compressor, with the call that was probably meant."""
    if isinstance(value, Compressor) and not isinstance(value, type):
        if isinstance(value, Codec) and not isinstance(getattr(value, "name", None), str):
            raise TypeError(f'{type(value).__name__} needs a name for reports, as in name = "every_other"')
        return
    meant = value if isinstance(value, str) else getattr(value, "__name__", None)
    hint = f" (did you mean {SPELLINGS[meant]}?)" if isinstance(meant, str) and meant in SPELLINGS else ""
    raise TypeError(f"{what} one of {', '.join(SPELLINGS.values())}, got {value!r}{hint}")


def hint_for(value: object) -> str:
    """Return what was meant by who passed a compressor where a plan goes; "" if this is none."""
    return " (did you mean gs.Plan(compress=...)?)" if isinstance(value, Compressor) else ""


def check_inner(what: str, value: object) -> None:
    """Refuse a wrapper around nothing."""
    if value is None:
        raise TypeError(f"{what} wraps a compressor, got None: what travels as it is has nothing to wrap")
    check_compressor(f"{what} wraps", value)


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
