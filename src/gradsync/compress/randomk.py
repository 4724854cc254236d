"""Random-k: all ranks send the same few elements, drawn anew in every step. Payloads add up like any tensor.

parameter   │ 0  1  2  3 │ 4  5  6 │ 7  8  9 │      three strata, as equal as possible
sent        │       ●    │ ●       │    ●    │      one of each, by a number all ranks know
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from gradsync.compress.param import Param, Span, key_of, number_of
from gradsync.compress.recipe import MAX_SEED, Codec, Compressor, MemoryTraffic, check_density, check_whole
from gradsync.compress.rounds import CodedBucket, Compute, Payload, Rounds, Sum
from gradsync.compress.topk import share
from gradsync.compress.wrappers import with_feedback
from gradsync.kernels.block_torch import dither


class Strata(NamedTuple):
    """The strata from which a step draws its elements: a row of numbers each, on the device of the bucket."""

    begin: torch.Tensor  # its first element in the flat tensor
    length: torch.Tensor
    param: torch.Tensor  # `number_of` the parameter
    ordinal: torch.Tensor  # which of the parameter's strata it is
    seed: int

    def indices(self, step: int) -> torch.Tensor:
        """The places in the flat tensor that travel in this step, ascending; the same on every rank."""
        drawn = dither(key_of(self.seed, step), self.param, self.ordinal)
        return self.begin + drawn % self.length


@dataclass(frozen=True)
class RandomK(Codec):
    """The codec of `randomk()`: the density and the seed, checked."""

    name: ClassVar[str] = "randomk"
    traffic = MemoryTraffic(12.1, 4.1)

    density: float
    seed: int = 0

    def __post_init__(self) -> None:
        check_density("randomk", self.density)
        object.__setattr__(self, "density", float(self.density))  # 1 and 1.0 are written alike
        check_whole("randomk: seed", self.seed, 0, MAX_SEED)

    def nbytes(self, param: Param) -> int:
        return self.count(param.numel) * payload_dtype(param.dtype).itemsize

    def count(self, numel: int) -> int:
        """Return how many elements of a parameter travel."""
        return share(self.density, numel)

    def strata(self, spans: Sequence[Span], device: torch.device | str = "cpu") -> Strata:
        """Return what `Strata.indices` needs, once per bucket.

        >>> strata = RandomK(0.5).strata([Span("weight", 0, 5)])
        >>> strata.begin.tolist(), strata.length.tolist()
        ([0, 1, 3], [1, 2, 2])
        """
        numel = np.array([span.numel for span in spans], np.int64)
        count = np.array([self.count(span.numel) for span in spans], np.int64)
        start = np.array([span.start for span in spans], np.int64)
        param = np.array([number_of(span.name) for span in spans], np.int64)
        of = np.repeat(np.arange(len(spans)), count)
        ordinal = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
        begin = ordinal * numel[of] // count[of]
        end = (ordinal + 1) * numel[of] // count[of]
        columns = np.stack([start[of] + begin, end - begin, param[of], ordinal])
        begins, lengths, params, ordinals = torch.from_numpy(columns).to(device)
        return Strata(begins, lengths, params, ordinals, self.seed)

    def rounds(self, bucket: CodedBucket) -> Rounds:
        """One sum."""
        payload = bucket.numbers(sum(self.count(param.numel) for param in bucket.params), payload_dtype(bucket.dtype))
        sampling = bucket.prepare(lambda: _Sampling(bucket, self.strata(bucket.spans, bucket.device), payload))
        yield Compute(lambda step: sampling.encode(step), encode=1)
        yield Sum(payload)
        yield Compute(lambda step: sampling.decode(), decode=1)


class _Sampling:
    """A bucket and its payload."""

    def __init__(self, bucket: CodedBucket, strata: Strata, payload: Payload) -> None:
        self._flat, self._residual, self._payload, self._strata = bucket.flat, bucket.residual, payload.tensor, strata
        self._places = strata.begin  # those drawn in the step under way
        # Without feedback an element stands for all of its stratum.
        self._weight = strata.length.to(torch.float32) if bucket.residual is None else None

    def encode(self, step: int) -> None:
        flat, residual, payload = self._flat, self._residual, self._payload
        self._places = places = self._strata.indices(step)
        if residual is not None:
            residual += flat
        values = flat if residual is None else residual
        # A NaN anywhere must be seen, though its place may not be drawn; the residual is clean again afterwards.
        spoiled = ~torch.linalg.vector_norm(values, torch.inf).isfinite()
        drawn = values[places].float() if self._weight is None else values[places] * self._weight
        payload.copy_(drawn.masked_fill(spoiled, torch.nan))
        if residual is not None:
            residual.index_copy_(0, places, drawn - payload.float())  # what a half type rounded away
            residual.masked_fill_(spoiled, 0)

    def decode(self) -> None:
        flat = self._flat
        flat.zero_()
        flat.index_copy_(0, self._places, self._payload.to(flat.dtype))


def randomk(density: float, seed: int = 0, feedback: bool = True) -> Compressor:
    """A random `density` of each parameter's elements, at least one, spread evenly over it.

    With feedback the elements that were not drawn wait for their turn. Without it each is multiplied by the number
    of elements it was drawn from, so that the gradient is right on average, with much noise.

    >>> weight = Param("weight", (1000, 1000))
    >>> randomk(0.01).choose(weight).nbytes(weight), weight.nbytes
    (40000, 4000000)
    """
    return with_feedback("randomk", RandomK(density, seed), feedback)


def payload_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the sent elements: fp32, or as they were if narrower."""
    return dtype if dtype.itemsize < torch.float32.itemsize else torch.float32
