"""What compression keeps lies by parameter name: copied out, put back where the parameter lies now, or handed back."""

from __future__ import annotations

import torch

import gradsync as gs
from gradsync.compress.recipe import Choice, Compressor
from gradsync.exchange.flat import FlatBucket, Item, lay_out
from gradsync.exchange.residuals import KeptState, begin, collect, place

SHAPES = {"wide": (8, 32), "tall": (32, 8), "bias": (5,)}


def bucket_of(compressor: Compressor | None, *names: str, index: int = 0) -> FlatBucket:
    """A bucket with these parameters, chosen for by the first."""
    items, form = lay_out([Item.like(name, torch.empty(SHAPES[name])) for name in names])
    choice = Choice() if compressor is None else compressor.choose(items[0].param)
    return FlatBucket(index, form.zeros(), items, choice)


def filled(flat_bucket: FlatBucket) -> FlatBucket:
    """With a residual of other numbers at every place, and other factors than at the start."""
    flat_bucket.begin_keeping()
    if flat_bucket.residual is not None:
        flat_bucket.residual.copy_(torch.arange(1.0, flat_bucket.flat.numel() + 1))
    for factor in flat_bucket.factors.values():
        factor += 1
    return flat_bucket


def assert_same(found: KeptState, expected: KeptState) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype
            assert torch.equal(ours[name], tensor)


def test_before_the_first_step_residuals_are_zero_and_factors_those_the_codec_starts_with() -> None:
    flat_bucket = bucket_of(gs.powersgd(2), "wide", "tall")
    codec = flat_bucket.choice.codec
    assert codec is not None
    starts = {item.name: codec.start(item.param) for item in flat_bucket.items}
    found = begin([flat_bucket, bucket_of(None, "bias", index=1)])
    zeros = {name: torch.zeros(SHAPES[name]) for name in ("wide", "tall")}
    assert_same(found, KeptState(zeros, {name: start for name, start in starts.items() if start is not None}))
    assert flat_bucket.residual is None, "asking begins nothing"
    assert not flat_bucket.factors


def test_what_is_begun_is_what_a_bucket_begins_to_keep() -> None:
    for compressor in (gs.powersgd(2), gs.int8(), gs.randomk(0.1, feedback=False), gs.powersgd(2, feedback=False)):
        flat_bucket = bucket_of(compressor, "wide", "tall")
        expected = begin([flat_bucket])
        flat_bucket.begin_keeping()
        assert_same(collect([flat_bucket]), expected)
        assert (flat_bucket.residual is None) == (not flat_bucket.choice.feedback)


def test_residuals_of_a_half_type_are_kept_in_32_bits() -> None:
    items, form = lay_out([Item.like("weight", torch.empty(8, 32, dtype=torch.bfloat16))])
    flat_bucket = FlatBucket(0, form.zeros(), items, gs.int8().choose(items[0].param))
    assert begin([flat_bucket]).residuals["weight"].dtype == torch.float32
    flat_bucket.begin_keeping()
    assert flat_bucket.residual is not None
    assert flat_bucket.residual.dtype == torch.float32


def test_what_is_collected_is_a_copy_row_by_row() -> None:
    flat_bucket = filled(bucket_of(gs.powersgd(2), "wide", "tall"))
    found = collect([flat_bucket])
    expected = KeptState(
        {"wide": torch.arange(1.0, 257).view(8, 32), "tall": torch.arange(257.0, 513).view(32, 8)},
        {name: factor.clone() for name, factor in flat_bucket.factors.items()},
    )
    assert_same(found, expected)
    assert flat_bucket.residual is not None
    flat_bucket.residual.zero_()
    for factor in flat_bucket.factors.values():
        factor.zero_()
    assert_same(found, expected)


def test_what_lies_by_columns_is_collected_by_rows() -> None:
    items, form = lay_out([Item.like("weight", torch.empty(4, 6).t())])
    flat_bucket = FlatBucket(0, form.zeros(), items, gs.int8().choose(items[0].param))
    flat_bucket.begin_keeping()
    assert flat_bucket.residual is not None
    items[0].of(flat_bucket.residual).copy_(torch.arange(24.0).view(6, 4))
    found = collect([flat_bucket]).residuals["weight"]
    assert found.is_contiguous()
    assert torch.equal(found, torch.arange(24.0).view(6, 4))


def test_what_is_kept_finds_its_parameter_in_another_division() -> None:
    kept = collect([filled(bucket_of(gs.powersgd(2), "wide", "tall"))])
    others = [bucket_of(gs.powersgd(2), "tall"), bucket_of(gs.powersgd(2), "wide", index=1)]
    for other in others:
        other.begin_keeping()
    left = place(kept, others)
    assert left == KeptState({}, {})
    assert_same(collect(others), kept)
    assert set(kept.residuals) == {"wide", "tall"}, "what was given is as before"
    for factor in kept.factors.values():
        factor.zero_()
    assert all(factor.any() for other in others for factor in other.factors.values()), "placed are copies"


def test_what_has_no_place_is_handed_back() -> None:
    kept = collect([filled(bucket_of(gs.powersgd(2), "wide", "tall"))])
    here = bucket_of(gs.powersgd(2), "wide")
    here.begin_keeping()
    left = place(kept, [here])
    assert_same(left, KeptState({"tall": kept.residuals["tall"]}, {"tall": kept.factors["tall"]}))
    nothing_kept = bucket_of(gs.powersgd(2, feedback=False), "wide")
    nothing_kept.begin_keeping()
    left = place(kept, [nothing_kept])
    assert set(left.residuals) == {"wide", "tall"}
    assert set(left.factors) == {"tall"}


def test_a_factor_of_another_rank_is_of_no_use() -> None:
    kept = collect([filled(bucket_of(gs.powersgd(2), "wide"))])
    for compressor in (gs.powersgd(3), gs.int8(), None):
        other = bucket_of(compressor, "wide")
        other.begin_keeping()
        before = collect([other]).factors
        left = place(kept, [other])
        assert not left.factors
        assert_same(KeptState({}, collect([other]).factors), KeptState({}, before))
