"""Buckets hold every gradient exactly once, in order, without overlap; and give back what was put in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.agreement.header import Mark
from gradsync.compress.cast import bf16
from gradsync.compress.integers import int8
from gradsync.compress.param import Param
from gradsync.compress.recipe import Choice
from gradsync.engine.bucket import _LARGE_NBYTES, Bucket, GradEntry, Layout
from gradsync.exchange.flat import zeros
from gradsync.plan.packing import default_limit

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
LARGE = _LARGE_NBYTES // 4  # elements of float32

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
small_tensors = st.builds(lambda shape, dtype: torch.zeros(shape, dtype=dtype), shapes, st.sampled_from(DTYPES))


def entries_of(tensors: list[torch.Tensor]) -> list[GradEntry]:
    made = []
    for index, tensor in enumerate(tensors):
        param = torch.nn.Parameter(tensor)
        made.append(GradEntry(index, f"p{index}", param, {"p": param}, "p", sparse=False))
    return made


def layout_of(
    tensors: list[torch.Tensor], bucket_bytes: int | None = None, held: frozenset[int] = frozenset()
) -> Layout:
    layout = Layout(entries_of(tensors), bucket_bytes, set(held))
    layout.place(zeros)
    return layout


def addresses(view: torch.Tensor) -> set[int]:
    """The byte addresses of a view's elements."""
    offsets = torch.zeros(view.shape, dtype=torch.int64)
    for axis, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
        steps = torch.arange(size) * stride * view.element_size()
        offsets += steps.reshape([-1 if i == axis else 1 for i in range(view.dim())])
    return {view.data_ptr() + int(offset) for offset in offsets.flatten()}


@settings(deadline=None)
@given(
    tensors=st.lists(small_tensors, min_size=1, max_size=12),
    limit=st.integers(1, 200),
    held=st.sets(st.integers(0, 11)),
)
def test_every_parameter_is_in_exactly_one_bucket_of_its_dtype(
    tensors: list[torch.Tensor], limit: int, held: set[int]
) -> None:
    layout = layout_of(tensors, limit, frozenset(held))
    placed = [entry for bucket in layout.buckets for entry in bucket.entries]
    assert sorted(entry.index for entry in placed) == list(range(len(tensors)))
    assert layout.indices == set(range(len(tensors)))
    for bucket in layout.buckets:
        assert {entry.param.dtype for entry in bucket.entries} == {bucket.flat.dtype}
        assert all(entry.bucket is bucket for entry in bucket.entries)


def test_held_parameters_travel_last_in_buckets_of_their_own() -> None:
    layout = layout_of([torch.zeros(4)] * 5, bucket_bytes=32, held=frozenset({0, 3}))
    assert [[entry.index for entry in bucket.entries] for bucket in layout.buckets] == [[1, 2], [4], [0, 3]]
    assert [bucket.held for bucket in layout.buckets] == [False, False, True]
    assert [bucket.index for bucket in layout.buckets] == [0, 1, 2]


def test_equal_layouts_have_equal_schedules_and_others_do_not() -> None:
    tensors = [torch.zeros(4), torch.zeros(6), torch.zeros(4)]
    layout_hash = layout_of(tensors, 64).layout_hash
    assert layout_of(tensors, 64).layout_hash == layout_hash
    assert layout_of(tensors, 1).layout_hash != layout_hash
    assert layout_of(tensors, 64, frozenset({1})).layout_hash != layout_hash
    assert layout_of([t.double() for t in tensors], 64).layout_hash != layout_hash


@pytest.mark.parametrize(
    ("megabytes", "limit"), [(1, 4 << 20), (64, 8 << 20), (1000, 25 << 20)], ids=["least", "an eighth", "most"]
)
def test_without_a_limit_a_bucket_is_an_eighth_of_the_model(megabytes: int, limit: int) -> None:
    assert default_limit(megabytes << 20) == limit


@settings(deadline=None)
@given(tensors=st.lists(st.tuples(shapes, st.booleans()), min_size=1, max_size=6))
def test_views_have_their_parameters_strides_and_do_not_overlap(tensors: list[tuple[tuple[int, ...], bool]]) -> None:
    made = [
        torch.zeros(shape).permute(list(reversed(range(len(shape))))) if turn else torch.zeros(shape)
        for shape, turn in tensors
    ]
    (bucket,) = layout_of(made, 1 << 20).buckets
    seen: set[int] = set()
    for entry in bucket.entries:
        view = entry.view
        assert (view.shape, view.dtype) == (entry.param.shape, entry.param.dtype)
        assert view.stride() == entry.param.stride() or not view.numel()
        mine = addresses(view)
        assert len(mine) == view.numel()
        assert not mine & seen
        seen |= mine
    assert all(bucket.flat.data_ptr() <= at < bucket.flat.data_ptr() + bucket.flat.nbytes for at in seen)


def test_a_channels_last_parameter_has_a_channels_last_view() -> None:
    weight = torch.zeros(8, 4, 3, 3).to(memory_format=torch.channels_last)
    (bucket,) = layout_of([weight]).buckets
    assert bucket.entries[0].view.is_contiguous(memory_format=torch.channels_last)


def test_an_expanded_parameter_still_gets_room_for_every_element() -> None:
    (bucket,) = layout_of([torch.zeros(1).expand(7)]).buckets
    assert len(addresses(bucket.entries[0].view)) == 7


def test_small_gradients_stand_first_and_together() -> None:
    (bucket,) = layout_of([torch.zeros(LARGE), torch.zeros(3), torch.zeros(LARGE), torch.zeros(5)], 1 << 30).buckets
    assert [entry.index for entry in bucket.entries] == [1, 3, 0, 2]
    assert [entry.large for entry in bucket.entries] == [False, False, True, True]
    assert bucket.small_flat.numel() == 32


def test_a_bucket_names_its_first_parameters() -> None:
    bucket = layout_of([torch.zeros(1)] * 5).buckets[0]
    assert bucket.describe() == "bucket 0 (p0, p1, p2 and 2 more)"


# Filling and handing out, on one process: what the others would add is nothing.


def filled_bucket(sizes: list[int]) -> tuple[Bucket, list[torch.Tensor]]:
    """A bucket whose parameters have gradients 1, 2, 3, …, and copies of these."""
    (bucket,) = layout_of([torch.zeros(size) for size in sizes], 1 << 30).buckets
    for entry in bucket.entries:
        entry.param.grad = torch.full_like(entry.param, entry.index + 1.0)
    return bucket, [torch.full((size,), i + 1.0) for i, size in enumerate(sizes)]


def all_used(bucket: Bucket) -> bytes:
    return bytes([1] * len(bucket.entries))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_what_is_handed_out_is_what_was_put_in_times_the_scale(scale: float, whole: bool) -> None:
    bucket, grads = filled_bucket([3, LARGE, 0, 5])
    bucket.complete(all_used(bucket), scale, whole)
    assert all(entry.param.grad is None for entry in bucket.entries)
    bucket.hand_out(None)
    for entry in bucket.entries:
        assert entry.param.grad is entry.view
        assert torch.equal(entry.param.grad, grads[entry.index] * scale)
        assert not entry.filled


def test_a_gradient_that_lives_in_the_bucket_is_scaled_there() -> None:
    bucket, grads = filled_bucket([3, LARGE])
    bucket.complete(all_used(bucket), 1.0)
    bucket.hand_out(None)
    bucket.complete(all_used(bucket), 0.5)
    bucket.hand_out(None)
    assert all(torch.equal(e.view, grads[e.index] * 0.5) for e in bucket.entries)


def test_a_gradient_taken_twice_is_added() -> None:
    bucket, grads = filled_bucket([LARGE])
    (entry,) = bucket.entries
    entry.take(0.5)
    assert entry.param.grad is None
    entry.param.grad = grads[0] * 4
    entry.take(0.5)
    assert torch.equal(entry.view, grads[0] * 2.5)


@pytest.mark.parametrize("size", [3, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("lives_in_bucket", [False, True])
def test_a_parameter_that_nobody_used_keeps_its_gradient(size: int, lives_in_bucket: bool) -> None:
    bucket, grads = filled_bucket([size, 4])
    if lives_in_bucket:
        bucket.complete(all_used(bucket), 1.0)
        bucket.hand_out(None)
    entry = next(e for e in bucket.entries if e.index == 0)
    before = entry.param.grad
    used = bytes([0, 1])
    bucket.complete(used, 0.5)
    assert torch.equal(entry.view, grads[0] * 0.5), "it contributes its gradient as it stands"
    bucket.hand_out(used)
    assert entry.param.grad is before
    assert torch.equal(entry.param.grad, grads[0])


@pytest.mark.parametrize("size", [3, LARGE], ids=["small", "large"])
def test_a_parameter_that_another_rank_used_gets_the_average(size: int) -> None:
    bucket, grads = filled_bucket([size])
    bucket.complete(bytearray([0]), 0.5)
    bucket.hand_out(bytes([1]))
    assert torch.equal(bucket.entries[0].param.grad, grads[0] * 0.5)


@pytest.mark.parametrize("size", [3, LARGE], ids=["small", "large"])
def test_an_unused_parameter_without_gradient_contributes_zeros_and_stays_without(size: int) -> None:
    bucket, _ = filled_bucket([size])
    bucket.flat.fill_(7.0)
    bucket.entries[0].param.grad = None
    bucket.complete(bytearray([0]), 0.5)
    assert not bucket.entries[0].view.any()
    bucket.hand_out(bytes([0]))
    assert bucket.entries[0].param.grad is None


@pytest.mark.parametrize(
    ("size", "used"),
    [
        (3, 0),
        (3, 1),
        (LARGE, 1),
        (LARGE, 0),
    ],
)
def test_a_sparse_gradient_in_a_dense_bucket_becomes_dense(size: int, used: int) -> None:
    bucket, _ = filled_bucket([size])
    (entry,) = bucket.entries
    entry.param.grad = torch.sparse_coo_tensor([[1]], [8.0], (size,), check_invariants=True)
    bucket.complete(bytearray([used]), 0.5)
    assert entry.view[:3].tolist() == [0.0, 4.0, 0.0]


@pytest.mark.parametrize("size", [3, LARGE], ids=["small", "large"])
def test_a_step_that_was_reset_leaves_nothing_to_the_next(size: int) -> None:
    bucket, grads = filled_bucket([size])
    bucket.complete(all_used(bucket), 0.5)
    bucket.reset()
    bucket.entries[0].param.grad = grads[0].clone()
    bucket.complete(all_used(bucket), 1.0)
    bucket.hand_out(None)
    assert torch.equal(bucket.entries[0].param.grad, grads[0])


@given(tensors=st.lists(small_tensors, max_size=12), limit=st.integers(1, 200))
def test_what_travels_in_different_ways_is_never_in_one_bucket(tensors: list[torch.Tensor], limit: int) -> None:
    def choose(param: Param) -> Choice:
        return (int8() if param.numel % 2 else bf16()).choose(param)

    layout = Layout(entries_of(tensors), limit, set(), choose)
    layout.place(zeros)
    for bucket in layout.buckets:
        for item in bucket.flat_bucket.items:
            assert choose(item.param._replace(dtype=bucket.flat.dtype)) == bucket.choice
    assert sorted(item.name for b in layout.buckets for item in b.flat_bucket.items) == sorted(
        f"p{index}" for index in range(len(tensors))
    )


@pytest.mark.parametrize("missing", [0, 1])
def test_a_gradient_that_was_taken_away_after_it_came_counts_as_zero(missing: int) -> None:
    layout = layout_of([torch.zeros(3), torch.zeros(2)])
    (bucket,) = layout.buckets
    bucket.flat.fill_(9.0)  # of a step before
    for entry in bucket.entries:
        entry.param.grad = None if entry.index == missing else torch.full_like(entry.param, 5.0)
    bucket.complete(bytearray([Mark.USED] * 2), 1.0, whole=True)
    for entry in bucket.entries:
        assert torch.equal(entry.view, torch.full_like(entry.param, 0.0 if entry.index == missing else 5.0))
        assert entry.param.grad is None
