"""Where blocks and their codes lie: every element once, no byte twice, and the same in any bucket."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import BLOCK_CODECS, lay_out, names

from gradsync.compress.blocks import BlockCodec, partition
from gradsync.compress.integers import Int8
from gradsync.compress.param import Param, Span, number_of
from gradsync.compress.topk import TopK
from gradsync.kernels.block_kernels import BODY, FIRST, HEAD, KEPT, LENGTH, PARAM, START, BlockTable

codecs = st.sampled_from(BLOCK_CODECS)
buckets = st.dictionaries(names, st.integers(0, 700), max_size=5)
some = settings(max_examples=60, deadline=None)


@some
@given(codec=codecs, sizes=buckets, num_parts=st.integers(1, 9), gap=st.integers(0, 40))
def test_every_element_is_in_one_block_of_its_parameter(
    codec: BlockCodec, sizes: dict[str, int], num_parts: int, gap: int
) -> None:
    spans = lay_out(sizes, gap=gap)
    rows = partition(codec, spans, num_parts).whole.rows.tolist()
    seen = Counter(row[START] + i for row in rows for i in range(row[LENGTH]))
    assert seen == Counter(span.start + i for span in spans for i in range(span.numel))
    begins = {number_of(span.name): span.start for span in spans}
    for row in rows:
        assert row[START] == begins[row[PARAM] & 0xFFFFFFFF] + row[FIRST]
        assert row[FIRST] % codec.block == 0
        assert 0 < row[LENGTH] <= codec.block
        assert row[KEPT] == codec.kept(row[LENGTH])


@some
@given(codec=codecs, sizes=buckets, num_parts=st.integers(1, 9))
def test_no_byte_is_given_away_twice(codec: BlockCodec, sizes: dict[str, int], num_parts: int) -> None:
    whole, parts, part_nbytes = partition(codec, lay_out(sizes), num_parts)
    assert part_nbytes == max(part.nbytes for part in parts)
    assert whole.nbytes == num_parts * part_nbytes
    for table in (whole, *parts):
        assert table.nbytes % 16 == 0
        used = bytes_of(codec, table)
        assert max(used.values(), default=1) == 1
        assert all(0 <= byte < table.nbytes for byte in used)
    for part in parts:
        assert part.nbytes - len(bytes_of(codec, part)) < 16, "but for the border of heads nothing is wasted"


def bytes_of(codec: BlockCodec, table: BlockTable) -> Counter[int]:
    used: Counter[int] = Counter()
    for row in table.rows.tolist():
        assert row[HEAD] % 4 == 0
        assert row[BODY] % 16 == 0
        used.update(range(row[HEAD], row[HEAD] + codec.head_nbytes(row[LENGTH])))
        used.update(range(row[BODY], row[BODY] + codec.body_nbytes(row[LENGTH])))
    return used


@some
@given(codec=codecs, sizes=buckets, num_parts=st.integers(1, 9))
def test_the_whole_is_its_parts_one_after_the_other(codec: BlockCodec, sizes: dict[str, int], num_parts: int) -> None:
    whole, parts, part_nbytes = partition(codec, lay_out(sizes), num_parts)
    moved = []
    for owner, part in enumerate(parts):
        for row in part.rows.tolist():
            row[HEAD] += owner * part_nbytes
            row[BODY] += owner * part_nbytes
            moved.append(row)
    assert whole.rows.tolist() == moved


@some
@given(codec=codecs, sizes=buckets, num_parts=st.integers(1, 9), data=st.data())
def test_owners_depend_on_the_parameter_alone(
    codec: BlockCodec, sizes: dict[str, int], num_parts: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(list(sizes)))
    together = owned(codec, lay_out({name: sizes[name] for name in order}, begin=160), num_parts)
    alone: dict[tuple[int, int], int] = {}
    for name, numel in sizes.items():
        alone |= owned(codec, [Span(name, 0, numel)], num_parts)
    assert together == alone


def owned(codec: BlockCodec, spans: list[Span], num_parts: int) -> dict[tuple[int, int], int]:
    """The owner of each block, by parameter and first element."""
    parts = partition(codec, spans, num_parts).parts
    return {(row[PARAM], row[FIRST]): owner for owner, part in enumerate(parts) for row in part.rows.tolist()}


@given(num_blocks=st.integers(0, 200), num_parts=st.integers(1, 20))
def test_a_parameter_is_shared_out_evenly(num_blocks: int, num_parts: int) -> None:
    parts = partition(Int8(32), [Span("weight", 0, 32 * num_blocks)], num_parts).parts
    shares = [len(part.rows) for part in parts]
    assert max(shares) - min(shares) <= 1


def test_many_small_parameters_are_shared_out_too() -> None:
    spans = lay_out({f"blocks.{i}.bias": 20 for i in range(400)})
    shares = [len(part.rows) for part in partition(Int8(), spans, 4).parts]
    assert min(shares) >= 70


@pytest.mark.parametrize("codec", BLOCK_CODECS, ids=repr)
@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 31, 32, 33, 64, 1000])
def test_nbytes_of_a_parameter_is_that_of_its_table(codec: BlockCodec, numel: int) -> None:
    assert codec.nbytes(Param("weight", (numel,))) == partition(codec, [Span("weight", 0, numel)], 1).whole.nbytes


def test_nothing_is_a_bucket_too() -> None:
    whole, parts, part_nbytes = partition(Int8(), [], 3)
    assert (whole.nbytes, part_nbytes) == (0, 0)
    assert [tuple(table.rows.shape) for table in (whole, *parts)] == [(0, 7)] * 4


@pytest.mark.parametrize(
    ("density", "length", "kept"),
    [(0.07, 100, 7), (0.1, 1024, 103), (0.01, 1024, 11), (1e-9, 1024, 1), (1, 7, 7), (1.0, 1, 1), (0.3, 10, 3)],
)
def test_top_k_keeps_its_share_as_written(density: float, length: int, kept: int) -> None:
    assert TopK(density).kept(length) == kept


def test_a_bucket_beyond_32_bits_is_refused_with_the_way_out() -> None:
    spans = [Span("weight", (1 << 31) - 10, 10)]
    with pytest.raises(ValueError, match="less than 2\\^31 elements; make bucket_bytes smaller"):
        partition(Int8(), spans, 2)
    # Top-k of everything takes four bytes per element.
    with pytest.raises(ValueError, match="less than 2\\^31 bytes, got 2147483648; make bucket_bytes smaller"):
        partition(TopK(1.0, 65536), [Span("weight", 0, 1 << 29)], 1)
