"""The rounds of every codec, run by ranks of one process: nothing is lost, all end alike, nothing else moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from samples import LEAVES

import gradsync as gs
from gradsync.compress.param import Param
from gradsync.compress.powersgd import PowerSGD
from gradsync.compress.randomk import RandomK
from gradsync.compress.recipe import Compressor
from gradsync.compress.rounds import Compute, Gather, Sum, Trade
from gradsync.exchange.bucket_route import RoutedBucket
from gradsync.exchange.flat import FlatBucket, Form, Item, lay_out

SHAPES = {"a": (64, 48), "b": (64, 48), "c": (128, 33)}
WITH_FEEDBACK = [each for each in LEAVES if each.choose(Param("a", SHAPES["a"])).feedback]
WITHOUT = [each for each in LEAVES if not each.choose(Param("a", SHAPES["a"])).feedback]


class Memory:
    """What a rank among others has."""

    def __init__(self, rank: int, size: int, in_memory: bool) -> None:
        self.rank, self.size, self.in_memory = rank, size, in_memory

    def for_sums(self, form: Form) -> torch.Tensor:
        return form.zeros()

    def for_gathering(self, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=device)


class Ranks:
    """Ranks that go through the rounds of one bucket, all at once."""

    def __init__(
        self,
        compressor: Compressor,
        size: int,
        in_memory: bool = False,
        dtype: torch.dtype = torch.float32,
        gap: int = 64,
    ) -> None:
        self.items, form = lay_out([Item.like(n, torch.empty(s, dtype=dtype)) for n, s in SHAPES.items()], gap)
        choice = compressor.choose(self.items[0].param)
        assert choice.codec is not None
        self.buckets = [FlatBucket(0, form.zeros(), self.items, choice) for _ in range(size)]
        self.stages: list[list[Any]] = []
        for rank, bucket in enumerate(self.buckets):
            bucket.begin_keeping()
            routed = RoutedBucket(bucket, Memory(rank, size, in_memory), form.device)
            self.stages.append(list(choice.codec.rounds(routed)))

    def go(self, grads: Sequence[torch.Tensor], step: int = 0) -> torch.Tensor:
        """One step of all; what every rank has at its end."""
        for bucket, grad in zip(self.buckets, grads, strict=True):
            bucket.flat.copy_(grad)
        for together in zip(*self.stages, strict=True):
            self._stage(together, step)
        first, *others = [bucket.flat for bucket in self.buckets]
        assert all(torch.equal(first.nan_to_num(), other.nan_to_num()) for other in others), "the same on every rank"
        return first.clone()

    def _stage(self, together: Sequence[Any], step: int) -> None:
        match together[0]:
            case Compute():
                for each in together:
                    each.run(step)
            case Sum():
                total = torch.stack([each.payload.tensor for each in together]).sum(0)
                for each in together:
                    each.payload.tensor.copy_(total)
            case Gather():
                rows = [each.rows.tensor[rank].clone() for rank, each in enumerate(together)]
                for each in together:
                    each.rows.tensor.copy_(torch.stack(rows))
            case Trade():
                given = [each.mine.tensor.clone() for each in together]
                for rank, each in enumerate(together):
                    each.rows.tensor.copy_(torch.stack([parts[rank] for parts in given]))

    def residuals(self) -> torch.Tensor:
        residuals = [bucket.residual for bucket in self.buckets if bucket.residual is not None]
        assert len(residuals) == len(self.buckets)
        return torch.stack(residuals).double().sum(0)

    def gradients(self, seed: int) -> list[torch.Tensor]:
        """Of each rank; zero in the gaps between parameters."""
        found = []
        for rank, bucket in enumerate(self.buckets):
            grad = torch.zeros_like(bucket.flat)
            for number, item in enumerate(self.items):
                generator = torch.Generator().manual_seed(100 * seed + 10 * rank + number)
                item.of(grad).copy_(torch.randn(item.shape, generator=generator))
            found.append(grad)
        return found


sizes = pytest.mark.parametrize(("size", "in_memory"), [(2, False), (3, False), (3, True)])


@sizes
@pytest.mark.parametrize("compressor", WITH_FEEDBACK, ids=repr)
def test_what_is_not_delivered_is_kept(compressor: Compressor, size: int, in_memory: bool) -> None:
    ranks = Ranks(compressor, size, in_memory)
    for step in range(3):
        before, grads = ranks.residuals(), ranks.gradients(step)
        delivered = ranks.go(grads, step)
        given = torch.stack(grads).double().sum(0) + before
        torch.testing.assert_close(delivered.double() + ranks.residuals(), given, rtol=1e-4, atol=1e-4)
        assert delivered.any()


@sizes
@pytest.mark.parametrize("compressor", WITHOUT, ids=repr)
def test_without_feedback_nothing_of_a_step_is_in_the_next(compressor: Compressor, size: int, in_memory: bool) -> None:
    ranks = Ranks(compressor, size, in_memory)
    grads = ranks.gradients(0)
    if not isinstance(ranks.buckets[0].choice.codec, PowerSGD):  # its factors are kept
        first = ranks.go(grads, step=5)
        ranks.go(ranks.gradients(1), step=6)
        assert torch.equal(ranks.go(grads, step=5), first)
    assert all(bucket.residual is None for bucket in ranks.buckets)
    ranks.go([torch.full_like(grad, torch.nan) for grad in grads], step=7)
    assert ranks.go(grads, step=8).isfinite().all()


@pytest.mark.parametrize("compressor", LEAVES, ids=repr)
def test_a_nan_is_seen_by_all_and_gone_in_the_next_step(compressor: Compressor) -> None:
    ranks = Ranks(compressor, 3)
    grads = ranks.gradients(0)
    spoiled = [grad.clone() for grad in grads]
    ranks.items[0].of(spoiled[1])[3, 5] = torch.nan
    assert not ranks.go(spoiled, 0).isfinite().all()
    found = ranks.go(grads, 1)
    assert found.isfinite().all()
    assert found.any()


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_randomk_delivers_just_the_elements_it_draws(feedback: bool, dtype: torch.dtype) -> None:
    ranks = Ranks(gs.randomk(0.1, feedback=feedback), 2, dtype=dtype)
    codec = ranks.buckets[0].choice.codec
    assert isinstance(codec, RandomK)
    strata = codec.strata([item.span for item in ranks.items])
    grads = ranks.gradients(0)
    found = ranks.go(grads, step=3)
    drawn = strata.indices(3)
    expected = torch.zeros_like(found)
    weight = torch.ones_like(strata.length) if feedback else strata.length
    payloads = [(grad[drawn].float() * weight).to(dtype if dtype.itemsize < 4 else torch.float32) for grad in grads]
    expected[drawn] = torch.stack(payloads).sum(0).to(dtype)
    assert torch.equal(found, expected)
    if feedback:
        for bucket, grad, payload in zip(ranks.buckets, grads, payloads, strict=True):
            left = grad.float()
            left[drawn] -= payload.float()
            assert bucket.residual is not None
            assert torch.equal(bucket.residual, left)


@pytest.mark.parametrize(("compressor", "dtype"), [(gs.fp16(), torch.float16), (gs.bf16(), torch.bfloat16)])
def test_a_cast_delivers_the_sum_of_what_was_rounded(compressor: Compressor, dtype: torch.dtype) -> None:
    plain, keeping = Ranks(compressor, 2), Ranks(gs.error_feedback(compressor), 2)
    grads = plain.gradients(0)
    rounded = [grad.to(dtype) for grad in grads]
    for ranks in (plain, keeping):
        assert torch.equal(ranks.go(grads), torch.stack(rounded).sum(0).float())
    for bucket, grad, sent in zip(keeping.buckets, grads, rounded, strict=True):
        assert bucket.residual is not None
        assert torch.equal(bucket.residual, grad - sent.float())
    keeping.go([torch.full_like(grad, 1e30) if dtype == torch.float16 else grad for grad in grads])
    assert keeping.residuals().isfinite().all()


@pytest.mark.parametrize("gap", [1, 4096])
@pytest.mark.parametrize("feedback", [True, False])
def test_powersgd_finds_a_matrix_of_its_rank_and_keeps_its_factor(feedback: bool, gap: int) -> None:
    ranks = Ranks(gs.powersgd(2, feedback=feedback), 2, gap=gap)
    grads = [torch.zeros_like(bucket.flat) for bucket in ranks.buckets]
    for number, item in enumerate(ranks.items):
        left, right = torch.randn(item.shape[0], 2), torch.randn(2, item.shape[1])
        for rank, grad in enumerate(grads):
            item.of(grad).copy_((rank + number + 1) * left @ right)
    for step in range(3):
        torch.testing.assert_close(ranks.go(grads, step), torch.stack(grads).sum(0), rtol=1e-3, atol=1e-3)
    first, second = (bucket.factors for bucket in ranks.buckets)
    assert first.keys() == second.keys() == SHAPES.keys()
    for name in SHAPES:
        assert torch.equal(first[name], second[name])
        assert first[name].shape == (SHAPES[name][1], 2)
    kept = {name: factor.clone() for name, factor in first.items()}
    ranks.go([grad * torch.nan for grad in grads])
    assert all(torch.equal(first[name], kept[name]) for name in SHAPES), "after a NaN the one of before"
    codec = ranks.buckets[0].choice.codec
    assert codec is not None
    ranks.go([torch.zeros_like(grad) for grad in grads])
    if not feedback:
        starts = {item.name: codec.start(item.param) for item in ranks.items}
        assert all(torch.equal(first[name], starts[name]) for name in SHAPES), "nothing was found: it begins anew"


def test_powersgd_comes_nearer_to_the_same_matrix_with_every_step() -> None:
    ranks = Ranks(gs.powersgd(4, feedback=False), 2)
    grads = ranks.gradients(0)
    truth = torch.stack(grads).sum(0)
    errors = [float((ranks.go(grads, step) - truth).norm() / truth.norm()) for step in range(6)]
    assert errors[5] < errors[1] < errors[0] < 1
