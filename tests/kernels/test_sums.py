"""The C sums equal the torch reference bit for bit, on every instruction set that this processor has."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.kernels.library import CODES, DTYPES, load
from gradsync.kernels.reference import sum_rows

LEVELS = ("portable", "avx2", "avx512")
LENGTHS = (0, 1, 7, 15, 16, 17, 63, 64, 65, 1000, 4099)
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.float64, *HALVES)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each level in turn; the widest again afterwards."""
    use(request.param)
    yield request.param
    use("")


def use(level: str) -> None:
    library = load()
    if library is None:
        pytest.skip("the C library was not built")
    if not library.gradsync_use_level(level.encode()):
        pytest.skip(f"this processor has no {level}")


def add_into(outs: Sequence[torch.Tensor], rows: Sequence[torch.Tensor], scale: float = 1.0) -> None:
    library = load()
    assert library is not None
    ins = (ctypes.c_void_p * len(rows))(*(row.data_ptr() for row in rows))
    out = (ctypes.c_void_p * len(outs))(*(each.data_ptr() for each in outs))
    library.gradsync_sum(ins, len(rows), out, len(outs), rows[0].numel(), CODES[rows[0].dtype], scale)


def added(rows: Sequence[torch.Tensor], scale: float = 1.0) -> torch.Tensor:
    out = torch.empty_like(rows[0])
    add_into([out], rows, scale)
    return out


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits, with every NaN as the same one."""
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    return tensor.view(_BITS[tensor.element_size()])


def assert_same_bits(ours: torch.Tensor, theirs: torch.Tensor, case: object) -> None:
    assert torch.equal(bits(ours), bits(theirs)), case


def make_rows(dtype: torch.dtype, num: int, length: int, shift: int = 0) -> list[torch.Tensor]:
    """Rows of mixed size and sign that begin `shift` elements into their memory; integers use all their bits."""
    generator = torch.Generator().manual_seed(1000 * num + length)
    if dtype.is_floating_point:
        wide = torch.randn(num, length + shift, generator=generator, dtype=torch.float64)
        wide *= 10.0 ** torch.randint(-6, 5, wide.shape, generator=generator)
        return [row[shift:] for row in wide.to(dtype)]
    whole = torch.randint(-(1 << 63), (1 << 63) - 1, (num, length + shift), generator=generator)
    return [row[shift:] for row in whole.to(dtype)]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8], ids=str)
def test_every_number_of_rows_and_length_gives_the_reference_bits(level: str, dtype: torch.dtype) -> None:
    for num in range(1, 10):
        for length in LENGTHS:
            rows = make_rows(dtype, num, length)
            for scale in (1.0, 1 / 3):
                assert_same_bits(added(rows, scale), sum_rows(rows, scale), (num, length, scale))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_may_begin_anywhere_and_nothing_beyond_them_is_written(level: str, dtype: torch.dtype) -> None:
    for shift in (1, 3, 5):
        for length in (0, 7, 64, 65, 1000):
            rows = make_rows(dtype, 3, length, shift)
            frame = torch.full((length + shift + 64,), 77, dtype=dtype)
            out = frame[shift : shift + length]
            add_into([out], rows, 1 / 3)
            assert_same_bits(out, sum_rows(rows, 1 / 3), (shift, length))
            assert bool((frame[:shift] == 77).all())
            assert bool((frame[shift + length :] == 77).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_may_be_the_inputs(level: str, dtype: torch.dtype) -> None:
    for length in LENGTHS:
        rows = make_rows(dtype, 4, length)
        truth = sum_rows(rows, 1 / 3)
        add_into(rows, rows, 1 / 3)
        for row in rows:
            assert_same_bits(row, truth, length)


# Half types: every pattern there is


def patterns(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_half_pattern_comes_through_unchanged(level: str, dtype: torch.dtype) -> None:
    every = patterns(dtype)
    assert_same_bits(added([every]), every, "alone")
    for i in range(0, every.numel(), 4099):  # one at a time: the end of a row has a loop of its own
        assert_same_bits(added([every[i : i + 3]]), every[i : i + 3], i)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_half_pattern_added_to_others_and_scaled(level: str, dtype: torch.dtype) -> None:
    every = patterns(dtype)
    for turn in (0, 1, 7, 1024, 30000, 32768, 65535):
        rows = [every, every.roll(turn)]
        for scale in (1.0, 1 / 3, 2.0**-9):
            assert_same_bits(added(rows, scale), sum_rows(rows, scale), (turn, scale))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_half_pattern_at_the_end_of_a_row(level: str, dtype: torch.dtype) -> None:
    """In rows of 3 the vector loop never runs: what the scalar conversions do."""
    every = patterns(dtype)[: 65535 // 3 * 3].reshape(-1, 3)
    other = every.flip(0)
    sums = sum_rows([every, other], 1 / 3)
    step = 37  # a call for each: a part of them, over the whole range
    for i in range(0, len(every), step):
        assert_same_bits(added([every[i], other[i]], 1 / 3), sums[i], i)


def test_half_sums_round_once_to_even_and_overflow_to_infinity(level: str) -> None:
    inf = float("inf")
    for dtype, one_ulp, largest in ((torch.float16, 2**-10, 65504.0), (torch.bfloat16, 2**-7, 3.3895313892515355e38)):
        cases = [
            ([1.0, one_ulp / 2], 1.0),  # a tie goes to the even one below
            ([1.0 + one_ulp, one_ulp / 2], 1.0 + 2 * one_ulp),  # and to the even one above
            ([1.0, one_ulp / 4, one_ulp / 4], 1.0),  # added in fp32, rounded once
            ([1.0, one_ulp / 2, one_ulp / 4], 1.0 + one_ulp),
            ([largest, largest], inf),
            ([-largest, -largest], -inf),
            ([largest, largest, -largest], largest),  # no overflow on the way
        ]
        if dtype == torch.bfloat16:
            cases.pop()  # fp32 has no more range than bf16
        for values, expected in cases:
            for length in (1, 64):
                rows = [torch.full((length,), value, dtype=dtype) for value in values]
                assert added(rows).tolist() == [expected] * length, (dtype, values)
        tiny = torch.tensor([1], dtype=torch.int16).view(dtype)  # the smallest subnormal
        for length in (1, 64):
            rows = [tiny.expand(length).contiguous()] * 3
            assert bits(added(rows)).tolist() == [3] * length


def test_integers_wrap_and_are_not_scaled(level: str) -> None:
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        info = torch.iinfo(dtype)
        for length in (1, 200):
            rows = [torch.full((length,), value, dtype=dtype) for value in (info.max, 1, -3)]
            assert added(rows[:2], 0.5).tolist() == [info.min] * length
            assert added(rows, 0.5).tolist() == [info.max - 2] * length


# Whatever floats there are


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(FLOATS),
    rows=st.integers(1, 4).flatmap(
        lambda num: st.integers(1, 40).flatmap(
            lambda length: st.lists(
                st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=length, max_size=length),
                min_size=num,
                max_size=num,
            )
        )
    ),
    scale=st.sampled_from([1.0, 0.25, 1 / 3, 0.0]),
)
def test_random_floats_with_infinities_and_nans(dtype: torch.dtype, rows: list[list[float]], scale: float) -> None:
    tensors = [torch.tensor(row, dtype=torch.float64).to(dtype).repeat(3) for row in rows]
    truth = sum_rows(tensors, scale)
    library = load()
    for level in LEVELS:
        if library is not None and library.gradsync_use_level(level.encode()):
            assert_same_bits(added(tensors, scale), truth, (level, dtype))
    use("")


def test_the_widest_level_is_the_default_and_an_unknown_one_is_refused() -> None:
    use("")
    library = load()
    assert library is not None
    has = [level for level in LEVELS if library.gradsync_use_level(level.encode())]
    assert has[0] == "portable"
    assert library.gradsync_use_level(b"abacus") == 0
    assert library.gradsync_level().decode() == has[-1]
    use("")
    assert library.gradsync_level().decode() == has[-1]
