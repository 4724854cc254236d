"""Tensors of one kind travel together, in order, at places of their own on aligned borders."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradsync as gs
from gradsync.compress.param import Param, Span
from gradsync.compress.recipe import EXACT, Choice
from gradsync.errors import NotEnoughMemory
from gradsync.exchange.flat import (
    FlatBucket,
    Form,
    Item,
    carve,
    cut_bytes,
    lay_out,
    make_flat_buckets,
    pack_items,
    sum_nbytes,
)

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


def bucket_of(num_items: int, choice: Choice = EXACT) -> FlatBucket:
    items, form = lay_out(items_of([torch.empty(5, 3)] * num_items))
    return FlatBucket(4, form.zeros(), items, choice)


def test_a_bucket_is_described_by_its_number_and_its_first_names() -> None:
    assert [bucket_of(number).describe() for number in (1, 3, 4, 6)] == [
        "bucket 4 (p0)",
        "bucket 4 (p0, p1, p2)",
        "bucket 4 (p0, p1, p2 and 1 more)",
        "bucket 4 (p0, p1, p2 and 3 more)",
    ]


def test_a_bucket_counts_its_bytes_with_and_without_gaps_and_as_its_compressor_claims() -> None:
    plain = bucket_of(2)
    assert (plain.nbytes, plain.raw_nbytes, plain.payload_nbytes) == (2 * 64, 2 * 60, 2 * 64)
    coded = bucket_of(2, gs.bf16().choose(Param("p0", (5, 3))))
    assert (coded.nbytes, coded.raw_nbytes, coded.payload_nbytes) == (2 * 64, 2 * 60, 2 * 30)


def test_a_bucket_begins_to_keep_once_and_can_keep_with_another() -> None:
    first, second = (bucket_of(2, gs.error_feedback(gs.bf16()).choose(Param("p0", (5, 3)))) for _ in range(2))
    first.begin_keeping()
    assert first.residual is not None
    first.residual.fill_(1)
    first.begin_keeping()
    assert first.residual.eq(1).all(), "what is there stays"
    second.keep_with(first)
    assert second.residual is first.residual
    assert second.factors is first.factors
    second.keep_with(None)
    assert (second.residual, second.factors) == (None, {})
    assert first.residual is not None


def test_a_compressor_is_told_a_matrix_as_it_lies_in_memory() -> None:
    by_rows, by_columns = torch.empty(4, 6), torch.empty(6, 4).t()
    assert Item.like("w", by_rows).param == Param("w", (4, 6), torch.float32)
    assert Item.like("w", by_columns).param == Param("w", (6, 4), torch.float32)
    assert Item.by_rows("w", by_columns).param == Param("w", (4, 6), torch.float32)
    [_, item] = lay_out(items_of([by_rows, by_columns])).items
    assert item.span == Span("p1", 32, 24)


def test_a_part_of_a_bucket_is_where_its_items_are() -> None:
    whole = torch.arange(200.0)
    [_, item], _ = lay_out(items_of([torch.empty(3), torch.empty(2, 2)]))
    assert item.of(whole).tolist() == [[16, 17], [18, 19]]
    assert item.of(whole[100:]).tolist() == [[116, 117], [118, 119]]


class Memory:
    """A team's memory with so many bytes."""

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.zeros(nbytes, dtype=torch.uint8)

    def allocate(self, nbytes: int) -> torch.Tensor:
        if nbytes > self.memory.numel():
            raise NotEnoughMemory(f"{nbytes} bytes are too many")
        return self.memory


FORMS = [Form(numel, torch.float32, torch.device("cpu")) for numel in (10, 2000, 30)]


def test_what_is_shared_lies_in_the_memory_of_the_team_on_pages_of_its_own() -> None:
    team = Memory(4096 + 8192)
    first, second, third = carve(team, FORMS, [True, False, True])  # type: ignore[arg-type]
    assert [len(flat) for flat in (first, second, third)] == [10, 2000, 30]
    assert (first.data_ptr(), third.data_ptr()) == (team.memory.data_ptr(), team.memory.data_ptr() + 4096)
    inside = range(team.memory.data_ptr(), team.memory.data_ptr() + team.memory.numel())
    assert second.data_ptr() not in inside
    for flat in (first, second, third):
        assert flat.eq(0).all()
        flat.fill_(1)
    assert team.memory.count_nonzero() == 2 * (10 + 30), "each 1.0 has two bytes that are not zero"


def test_without_enough_memory_of_the_team_ordinary_memory_serves_and_says_so() -> None:
    team = Memory(4096)
    with pytest.warns(UserWarning, match="^8192 bytes are too many; gradients are staged through a small window"):
        flats = carve(team, FORMS, [True, False, True])  # type: ignore[arg-type]
    assert [(len(flat), int(flat.count_nonzero())) for flat in flats] == [(10, 0), (2000, 0), (30, 0)]
    for flat in flats:
        flat.fill_(1)
    assert not team.memory.any()


def test_flat_buckets_take_the_next_numbers_and_no_more() -> None:
    layouts = [(lay_out(items_of([torch.empty(size)])), EXACT) for size in (3, 40)]
    numbers = count(5)
    made = make_flat_buckets(layouts, numbers, lambda forms: [form.zeros() for form in forms])
    assert [(each.index, each.flat.numel(), each.items[0].shape) for each in made] == [(5, 16, (3,)), (6, 48, (40,))]
    assert next(numbers) == 7
