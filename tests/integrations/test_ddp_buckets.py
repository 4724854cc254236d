"""Flat buckets hold every gradient of a bucket of DDP once, and gives it back where it was."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradsync as gs
from gradsync.compress.param import Param
from gradsync.compress.recipe import EXACT, Choice
from gradsync.exchange.flat import Item, lay_out, zeros
from gradsync.integrations.ddp_buckets import DDPBucket, divide, item_in_bucket, make_ddp_bucket

CHOICES = [EXACT, gs.int8().choose(Param("any", (4, 4))), gs.topk(0.1).choose(Param("any", (4, 4)))]
buckets = st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(CHOICES)), min_size=1, max_size=8)


def _make(bucket: list[tuple[list[int], Choice]]) -> tuple[DDPBucket, list[Item]]:
    items = _bucket_of([(str(i), torch.zeros(shape)) for i, (shape, _) in enumerate(bucket)])
    return make_ddp_bucket(items, lambda param: bucket[int(param.name)][1], list(range(3, 20)), zeros), items


def _bucket_of(named: list[tuple[str, torch.Tensor]]) -> list[Item]:
    return lay_out([item_in_bucket(name, param) for name, param in named], align_nbytes=1).items


@settings(max_examples=100, deadline=None)
@given(bucket=buckets)
def test_what_is_put_in_comes_out_scaled(bucket: list[tuple[list[int], Choice]]) -> None:
    ddp_bucket, items = _make(bucket)
    gradients = torch.arange(float(sum(item.param.numel for item in items)))
    buffer = gradients.clone()
    ddp_bucket.pack(buffer, 0.5)
    for flat_bucket in ddp_bucket.flat_buckets:
        for item in flat_bucket.items:
            place = next(each for each in items if each.name == item.name)
            assert torch.equal(item.of(flat_bucket.flat), place.of(gradients) * 0.5)
        flat_bucket.flat.mul_(4)
    assert torch.equal(ddp_bucket.unpack(buffer), gradients * 2)


@settings(max_examples=100, deadline=None)
@given(bucket=buckets)
def test_each_way_to_travel_has_one_flat_bucket_without_gaps(bucket: list[tuple[list[int], Choice]]) -> None:
    ddp_bucket, items = _make(bucket)
    flat_buckets = ddp_bucket.flat_buckets
    assert {flat_bucket.choice for flat_bucket in flat_buckets} == {choice for _, choice in bucket}
    assert [flat_bucket.index for flat_bucket in flat_buckets] == list(range(3, 3 + len(flat_buckets)))
    assert sum(flat_bucket.flat.numel() for flat_bucket in flat_buckets) == sum(item.param.numel for item in items)
    assert sorted(item.name for flat_bucket in flat_buckets for item in flat_bucket.items) == sorted(
        item.name for item in items
    )


def test_a_bucket_of_one_choice_stays_as_it_lies() -> None:
    items = _bucket_of([("b", torch.zeros(3)), ("a", torch.zeros(2, 2))])
    assert divide(items, lambda param: EXACT) == [([0, 1], EXACT)]
    assert make_ddp_bucket(items, lambda param: EXACT, [0, 1], zeros).flat_buckets[0].items == items


def test_like_shapes_lie_together_in_a_divided_bucket() -> None:
    named = [("w0", torch.zeros(4, 2)), ("b0", torch.zeros(4)), ("w1", torch.zeros(2, 4)), ("w2", torch.zeros(4, 2))]
    ddp_bucket = make_ddp_bucket(_bucket_of(named), lambda param: CHOICES[len(param.shape) - 1], [0, 1], zeros)
    names = [[item.name for item in flat_bucket.items] for flat_bucket in ddp_bucket.flat_buckets]
    assert names == [["w1", "w0", "w2"], ["b0"]]


def test_a_parameter_with_holes_is_laid_out_row_by_row() -> None:
    assert item_in_bucket("w", torch.zeros(4, 6)[:, ::2]).strides == (3, 1)
