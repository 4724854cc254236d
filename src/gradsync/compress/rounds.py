"""The rounds of a compressor, as data: what it computes, and what it sends in between. Each compressor says it once.

    rounds(bucket)    Compute ──── Sum ──── Compute ──── Sum ──── Compute      (PowerSGD: P, then Q)
    the pipeline      runs         launches runs         launches runs         `exchange.bucket_route`, in every step
    the planner       prices       prices   prices       prices   prices       `planner.stages`: a `BucketForm`
    the probe         times        nothing  times        nothing  times        `probe.codecs`

`rounds` is a generator that is read to its end once per bucket, not once per step: it asks the bucket for the memory
of its payloads, makes with `prepare` whatever else takes memory or time, and yields the stages of every step in their
order. What a `Compute` runs may use all of that. A planner's bucket is a `BucketForm`: it has no tensors, prepares
nothing, and nothing is run; so a generator itself looks only at the form of its bucket (`params`, `numel`, `dtype`,
`size`, `rank`, `in_memory`). Every rank yields the same rounds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch

from gradsync.compress.param import Param, Span

T = TypeVar("T")


class Payload:
    """Memory that a round reads and fills."""

    tensor: torch.Tensor  # where the bucket's device works on it; there is none in a `BucketForm`

    def __init__(self, nbytes: float) -> None:
        """`nbytes`: what one rank brings, as its codec claims."""
        self.nbytes = nbytes


class Compute(NamedTuple):
    """A computation that a rank does alone, told the step; and how long, in multiples of what a probe measures."""

    run: Callable[[int], object]
    encode: float = 0.0  # of encoding the whole bucket,
    decode: float = 0.0  # of decoding one rank's payload of it,
    between: float = 0.0  # of what comes between the first round and the last

    @property
    def what(self) -> str:
        """The name under which its seconds are counted; "" if they are not."""
        if self.encode or self.between:
            return "encode_s"
        return "decode_s" if self.decode else ""


class Sum(NamedTuple):
    """Everybody's payload is added up, in place."""

    payload: Payload


class Gather(NamedTuple):
    """Each rank has filled its own row, and gets those of all others."""

    rows: Payload


class Trade(NamedTuple):
    """Each rank gives every rank its part of `mine`; `rows` are the parts that they give to it."""

    rows: Payload
    mine: Payload


class SumInside(NamedTuple):
    """The ranks of each host add up, in place."""

    payload: Payload


class NoRound(NamedTuple):
    """A round that others have here, and this rank has not."""


Rounds = Iterator[Compute | Sum | Gather | Trade | SumInside | NoRound]


class CodedBucket(ABC):
    """Gradients that travel together, and the ranks they travel among."""

    params: Sequence[Param]
    numel: int  # of the flat tensor: there may be gaps between parameters
    dtype: torch.dtype
    size: int  # ranks that take part
    rank: int  # this one's index among them
    in_memory: bool  # whether rows that are gathered never leave the host
    whole: Payload  # the gradients themselves
    # What only a `Compute` may use:
    flat: torch.Tensor
    device: torch.device
    spans: Sequence[Span]
    factors: dict[str, torch.Tensor]  # what the codec keeps by parameter; see `Codec.start`
    residual: torch.Tensor | None = None  # what was not sent yet: fp32, laid out as `flat`; None: what is lost is lost

    @abstractmethod
    def numbers(self, numel: int, dtype: torch.dtype) -> Payload:
        """Memory for a `Sum`, zeros; on every rank at once."""

    @abstractmethod
    def rows(self, num_rows: int, nbytes: Callable[[], int], claimed: float) -> Payload:
        """Rows of bytes for a `Gather` or `Trade`, zeros; on every rank at once.

        `nbytes` is how long a row is, `claimed` what one rank brings as far as can be told without laying it out.
        """

    @abstractmethod
    def prepare(self, make: Callable[[], T]) -> T:
        """Return what `make` makes, once and for all steps."""


class BucketForm(CodedBucket):
    """A bucket without memory, for who only wants to know the rounds."""

    def __init__(self, params: Sequence[Param], size: int, in_memory: bool = False) -> None:
        self.params, self.size, self.in_memory, self.rank = params, size, in_memory, 0
        self.numel, self.dtype = sum(param.numel for param in params), params[0].dtype
        self.whole = Payload(sum(param.nbytes for param in params))

    def numbers(self, numel: int, dtype: torch.dtype) -> Payload:
        return Payload(numel * dtype.itemsize)

    def rows(self, num_rows: int, nbytes: Callable[[], int], claimed: float) -> Payload:
        return Payload(claimed)

    def prepare(self, make: Callable[[], T]) -> T:
        nothing: T = None  # type: ignore[assignment]
        return nothing  # and nothing that would use it is run


def exact(bucket: CodedBucket) -> Rounds:
    """Send a bucket as it is: one sum."""
    yield Sum(bucket.whole)


def across(bucket: CodedBucket, inner: Rounds, encodes: bool) -> Rounds:
    """Sum exactly inside each host, compressed across: the first rank of a host encodes for it.

    inside, a sum      across, compressed             inside, back to all
    ranks of a host    the first ranks of all hosts   ranks of a host

    `inner` are the rounds across; a rank that does not `speak` is absent from them.
    """
    yield SumInside(bucket.whole)
    if encodes:
        yield from inner
    else:
        yield from absences(inner)
        yield Compute(lambda step: bucket.flat.zero_())
    # What the others bring is zero: adding it up hands the first rank's to all.
    yield SumInside(bucket.whole)


def absences(rounds: Iterable[object]) -> Rounds:
    """An absence for each of these rounds: other ranks run them without this rank."""
    return (NoRound() for stage in rounds if not isinstance(stage, Compute))
