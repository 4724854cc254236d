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

from gradsync.compress.blocks import Span
from gradsync.compress.recipe import (
    MAX_SEED,
    Choice,
    Compressor,
    Param,
    check_density,
    check_whole,
    if_real,
    key_of,
    number_of,
)
from gradsync.compress.topk import share
from gradsync.compress.wrappers import with_feedback
from gradsync.kernels.block_torch import dither


class Strata(NamedTuple):
    """Where the elements of a step are drawn from: a row of numbers per stratum, on the device of the bucket."""

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
class RandomK:
    """See `randomk`."""

    name: ClassVar[str] = "randomk"
    summable: ClassVar[bool] = True

    density: float
    seed: int = 0

    def __post_init__(self) -> None:
        check_density("randomk", self.density)
        object.__setattr__(self, "density", float(self.density))  # 1 and 1.0 are written alike
        check_whole("randomk: seed", self.seed, 0, MAX_SEED)

    def choose(self, param: Param) -> Choice:
        return if_real(self, param)

    def nbytes(self, param: Param) -> int:
        return self.count(param.numel) * payload_dtype(param.dtype).itemsize

    def count(self, numel: int) -> int:
        """How many elements of a parameter travel."""
        return share(self.density, numel)

    def strata(self, spans: Sequence[Span], device: torch.device | str = "cpu") -> Strata:
        """What `Strata.indices` needs, once per bucket.

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
    """What the sent elements are: fp32, or as they were if narrower."""
    return dtype if dtype.itemsize < torch.float32.itemsize else torch.float32
