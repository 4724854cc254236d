"""PowerSGD: a matrix as the product of two thin ones, found by one step of power iteration per synchronization.

    M [rows, cols] ≈ P [rows, rank] · Q [cols, rank]ᵀ

    P = mean over ranks of M·Q;  P = orthogonal(P);  Q = mean over ranks of Mᵀ·P;  Q is kept for the next step

Both means are sums of tensors, so that they ride any all-reduce. Vogels, Karimireddy, Jaggi 2019, arXiv:1905.13727.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, NamedTuple

import torch

from gradsync.compress.param import Param, Span, number_of
from gradsync.compress.recipe import EXACT, MAX_SEED, Choice, Codec, Compressor, MemoryTraffic, check_whole, is_number
from gradsync.compress.rounds import CodedBucket, Compute, Payload, Rounds, Sum
from gradsync.compress.wrappers import with_feedback
from gradsync.kernels.powersgd_kernels import orthogonalize, project, project_back, restore

_MEASURED_RANK = 4  # by probes, and where nobody measured


@dataclass(frozen=True)
class PowerSGD(Codec):
    """The codec of `powersgd()`: the rank, the least ratio and the seed, checked."""

    name: ClassVar[str] = "powersgd"
    traffic = MemoryTraffic(12.0, 8.0, 8.0)

    rank: int = 4
    min_ratio: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("powersgd: rank", self.rank, 1)
        if not is_number(self.min_ratio) or self.min_ratio < 1:
            raise ValueError(
                f"powersgd: min_ratio must be a number of at least 1, got {self.min_ratio!r} "
                "(a gradient that does not shrink by this factor goes as it is)"
            )
        object.__setattr__(self, "min_ratio", float(self.min_ratio))  # 2 and 2.0 are written alike
        check_whole("powersgd: seed", self.seed, 0, MAX_SEED)

    def choose(self, param: Param) -> Choice:
        if len(param.shape) < 2 or self.rank >= min(matrix(param.shape)):
            return EXACT
        return super().choose(param) if self.nbytes(param) * self.min_ratio <= param.nbytes else EXACT

    def nbytes(self, param: Param) -> int:
        return torch.float32.itemsize * self.rank * sum(matrix(param.shape))

    def start(self, param: Param) -> torch.Tensor:
        return start_q(param, self.rank, self.seed)

    def rounds(self, bucket: CodedBucket) -> Rounds:
        """Two sums of thin matrices, P and then Q, which the pipeline overlaps between buckets."""
        sides = zip(*(matrix(param.shape) for param in bucket.params), strict=True)
        p, q = (bucket.numbers(self.rank * sum(side), torch.float32) for side in sides)
        work = bucket.prepare(lambda: _Factoring(self, bucket, p, q))
        cost = (1 + self.rank / _MEASURED_RANK) / 2  # half of it is reading the matrix, whatever the rank
        yield Compute(lambda step: work.project(), encode=cost)
        yield Sum(p)
        yield Compute(lambda step: work.project_back(), between=cost)
        yield Sum(q)
        yield Compute(lambda step: work.restore(), decode=cost)


def powersgd(rank: int = 4, min_ratio: float = 2.0, seed: int = 0, feedback: bool = True) -> Compressor:
    """Two factors of this rank instead of a matrix; vectors, and what would not shrink `min_ratio` times, go exactly.

    >>> weight, bias = Param("weight", (1024, 1024)), Param("bias", (1024,))
    >>> powersgd(rank=4).choose(weight).nbytes(weight), weight.nbytes
    (32768, 4194304)
    >>> powersgd(rank=4).choose(bias).label
    'exact'
    """
    return with_feedback("powersgd", PowerSGD(rank, min_ratio, seed), feedback)


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """A gradient seen as rows and columns: its first dimension against all others.

    >>> matrix((64, 3, 7, 7))
    (64, 147)
    """
    return shape[0], math.prod(shape[1:])


def start_q(param: Param, rank: int, seed: int) -> torch.Tensor:
    """The first Q [cols, rank]: gaussian, the same on every rank and in every layout.

    >>> start_q(Param("weight", (8, 6)), rank=2, seed=0).shape
    torch.Size([6, 2])
    """
    generator = torch.Generator("cpu").manual_seed(number_of(param.name) ^ seed)
    return torch.randn(matrix(param.shape)[1], rank, generator=generator, dtype=torch.float32, device="cpu")


class _Batch(NamedTuple):
    """Matrices of like shape that lie one after the other."""

    params: list[Param]
    grad: torch.Tensor  # [count, rows, cols], as views
    residual: torch.Tensor
    p: torch.Tensor  # [count, rows, rank], where it is added up
    q: torch.Tensor  # [count, cols, rank], likewise
    start: torch.Tensor  # the first q


class _Factoring:
    """A bucket of matrices, and its payloads."""

    def __init__(self, codec: PowerSGD, bucket: CodedBucket, p: Payload, q: Payload) -> None:
        self._codec, self._factors = codec, bucket.factors
        # Without feedback the sum of gradient and nothing is made in the same place.
        self._scratch = torch.zeros_like(bucket.flat, dtype=torch.float32) if bucket.residual is None else None
        self._batches = list(self._make_batches(bucket, p.tensor, q.tensor))
        self._before: list[torch.Tensor] = []  # of the step under way: Q of the last one,
        self._own: list[torch.Tensor] = []  # and this rank's part of the new one

    def _make_batches(self, bucket: CodedBucket, all_p: torch.Tensor, all_q: torch.Tensor) -> Iterator[_Batch]:
        p_at, q_at, rank = 0, 0, self._codec.rank
        residual = bucket.residual if self._scratch is None else self._scratch
        assert residual is not None
        placed = list(zip(bucket.params, bucket.spans, strict=True))
        for (rows, cols), group in groupby(placed, lambda each: matrix(each[0].shape)):
            for params, start in _side_by_side(list(group), rows * cols):
                count = len(params)
                p = all_p[p_at : p_at + count * rows * rank].view(count, rows, rank)
                q = all_q[q_at : q_at + count * cols * rank].view(count, cols, rank)
                here = slice(start, start + count * rows * cols)
                grad, left = (flat[here].view(count, rows, cols) for flat in (bucket.flat, residual))
                first = torch.stack([self._codec.start(param) for param in params]).to(grad.device)
                yield _Batch(params, grad, left, p, q, first)
                p_at, q_at = p_at + p.numel(), q_at + q.numel()

    def project(self) -> None:
        if self._scratch is not None:
            self._scratch.zero_()
        factors, batches = self._factors, self._batches
        self._before = before = [torch.stack([factors[param.name] for param in batch.params]) for batch in batches]
        for batch, q in zip(batches, before, strict=True):
            batch.p.copy_(project(batch.grad, batch.residual, q))

    def project_back(self) -> None:
        self._own = own = []
        for batch in self._batches:
            orthogonalize(batch.p)
            own.append(project_back(batch.residual, batch.p))
            batch.q.copy_(own[-1])

    def restore(self) -> None:
        for batch, q_own, q_before in zip(self._batches, self._own, self._before, strict=True):
            restore(batch.grad, batch.residual, batch.p, q_own, batch.q)
            self._keep(batch, q_before)
        self._before, self._own = [], []

    def _keep(self, batch: _Batch, before: torch.Tensor) -> None:
        """Keep the Q with which the next step begins; after a NaN the one with which this step began.

        A matrix of a lower rank leaves columns of zeros, from which no step would find anything: they begin anew.
        """
        sound = batch.q.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
        found = torch.where((batch.q == 0).all(-2, keepdim=True), batch.start, batch.q)
        for param, q in zip(batch.params, torch.where(sound, found, before), strict=True):
            self._factors[param.name] = q


def _side_by_side(placed: list[tuple[Param, Span]], numel: int) -> Iterator[tuple[list[Param], int]]:
    """Cut where there is a gap between neighbours: a batch is one contiguous view. Each with where it begins."""
    params: list[Param] = []
    begin = 0
    for param, span in placed:
        if params and span.start != begin + len(params) * numel:
            yield params, begin
            params = []
        if not params:
            begin = span.start
        params.append(param)
    yield params, begin
