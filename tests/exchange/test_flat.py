"""Tensors of one kind travel together, in order, at places of their own on aligned borders."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradsync as gs
from gradsync.compress.param import Param
from gradsync.compress.recipe import EXACT
from gradsync.exchange.flat import Item, cut_bytes, lay_out, pack_items, sum_nbytes

DTYPES = [torch.uint8, torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
tensors = st.lists(st.builds(torch.ones, shapes, dtype=st.sampled_from(DTYPES)), max_size=12)


def items_of(tensors: list[torch.Tensor]) -> list[Item]:
    return [Item.like(f"p{number}", tensor) for number, tensor in enumerate(tensors)]


def packed(items: list[Item], limit: float) -> list[list[int]]:
    return [numbers for numbers, _ in pack_items(items, limit, lambda param: EXACT)]


@given(tensors=tensors, limit=st.integers(1, 200))
def test_a_bucket_is_closed_by_the_tensor_that_reaches_the_limit(tensors: list[torch.Tensor], limit: int) -> None:
    groups = packed(items_of(tensors), limit)
    assert all(sum(tensors[number].nbytes for number in group[:-1]) < limit for group in groups)
    for dtype in DTYPES:
        # Only the last bucket of a dtype may be short.
        sizes = [sum(tensors[n].nbytes for n in group) for group in groups if tensors[group[0]].dtype == dtype]
        assert all(size >= limit for size in sizes[:-1])


@given(tensors=tensors, limit=st.integers(1, 200))
def test_packing_keeps_the_order_of_each_dtype(tensors: list[torch.Tensor], limit: int) -> None:
    groups = packed(items_of(tensors), limit)
    for dtype in DTYPES:
        order = [number for group in groups for number in group if tensors[number].dtype == dtype]
        assert order == [number for number, tensor in enumerate(tensors) if tensor.dtype == dtype]


def test_buckets_stand_in_the_order_in_which_they_get_full() -> None:
    wide, narrow = torch.zeros(100, dtype=torch.float64), torch.zeros(10)
    assert packed(items_of([narrow, wide, narrow, narrow]), 120) == [[1], [0, 2, 3]]


def test_like_shapes_that_are_compressed_lie_together_and_no_others() -> None:
    items = items_of([torch.zeros(64, 32), torch.zeros(32, 64), torch.zeros(64, 32), torch.zeros(9)])
    choose = gs.powersgd(1).choose
    exact, low_rank = choose(Param("bias", (9,))), choose(items[0].param)
    assert pack_items(items, 1e9, choose) == [([1, 0, 2], low_rank), ([3], exact)]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.sampled_from(DTYPES))
def test_items_are_aligned_disjoint_and_in_order(sizes: list[int], dtype: torch.dtype) -> None:
    items, form = lay_out(items_of([torch.empty(size, dtype=dtype) for size in sizes]))
    offsets = [item.start for item in items]
    ends = [*offsets[1:], form.numel]
    assert all(offset * dtype.itemsize % 64 == 0 for offset in [*offsets, form.numel])
    assert all(
        offset + size <= end < offset + size + 64 for offset, size, end in zip(offsets, sizes, ends, strict=True)
    )


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.sampled_from(DTYPES))
def test_items_lie_without_gaps_where_none_are_asked_for(sizes: list[int], dtype: torch.dtype) -> None:
    items, form = lay_out(items_of([torch.empty(size, dtype=dtype) for size in sizes]), align_nbytes=1)
    assert [item.start for item in items] == [sum(sizes[:number]) for number in range(len(sizes))]
    assert form.numel == sum(sizes)


@given(tensors=tensors, align_nbytes=st.sampled_from([16, 4096]))
def test_bytes_hold_every_tensor(tensors: list[torch.Tensor], align_nbytes: int) -> None:
    memory = torch.zeros(sum_nbytes(tensors, align_nbytes), dtype=torch.uint8)
    views = cut_bytes(memory, tensors, align_nbytes)
    for view, tensor in zip(views, tensors, strict=True):
        assert not view.any()
        view.copy_(tensor)
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True))
    assert all((view.data_ptr() - memory.data_ptr()) % align_nbytes == 0 for view in views if view.numel())


@pytest.mark.parametrize("make", [Item.like, Item.by_rows])
def test_an_item_has_room_for_every_element_of_a_tensor_with_holes(make: object) -> None:
    tensor = torch.arange(24.0).reshape(4, 6)[:, ::2]
    assert callable(make)
    [item], form = lay_out([make("w", tensor)], align_nbytes=1)
    flat = form.zeros()
    item.of(flat).copy_(tensor)
    assert torch.equal(item.of(flat), tensor)
    assert sorted(flat.tolist()) == sorted(tensor.flatten().tolist())
