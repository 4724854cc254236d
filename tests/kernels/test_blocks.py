"""Block codes: the C kernels equal the torch reference bit for bit, and the reference keeps its promises."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from block_tables import make_table
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.kernels import block_codes, blocks
from gradsync.kernels.blocks import BlockTable, Code, Method, Mode
from gradsync.kernels.library import load

LEVELS = ("portable", "avx2", "avx512")
LENGTHS = (1, 2, 5, 8, 15, 16, 17, 31, 32, 33, 40, 63, 64, 65, 100, 127, 128, 129, 250, 256)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
CODES = [Code(method, 256) for method in Method] + [Code(method, 256, True) for method in (Method.INT8, Method.INT4)]
CODED_BY_SCALE = [code for code in CODES if code.method != Method.TOPK]
INF, NAN = float("inf"), float("nan")
SPECIAL = (0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-39, 2**-101, 2**-100, 1e30, 2.0**126, 3.4e38, -3.4e38, INF, -INF, NAN)


class Encoded(NamedTuple):
    payload: torch.Tensor
    residual: torch.Tensor


def levels() -> Iterator[str]:
    """Every instruction set that is here, in use while the loop's body runs; the widest again afterwards."""
    library = load()
    if library is None:
        pytest.skip("the C library was not built")
    for level in LEVELS:
        if library.gradsync_use_level(level.encode()):
            yield level
    library.gradsync_use_level(b"")


def encoded(
    by: object, code: Code, flat: torch.Tensor, residual: torch.Tensor, table: BlockTable, mode: Mode, key: int = 9
) -> Encoded:
    """Payload and residual that `by` makes. Bytes that nobody writes are 0xAA, here as there."""
    payload = torch.full((table.nbytes,), 0xAA, dtype=torch.uint8)
    after = residual.clone()
    by.encode(code, flat, None if mode == Mode.NONE else after, table, payload, mode, key)
    return Encoded(payload, after)


def decoded(
    by: object, code: Code, payloads: torch.Tensor, table: BlockTable, size: int, dtype: torch.dtype
) -> torch.Tensor:
    flat = torch.full((size,), 77.0, dtype=dtype)
    by.decode(code, payloads, table, flat)
    return flat


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits, with every NaN as the same one."""
    return torch.where(tensor.isnan(), torch.full_like(tensor, NAN), tensor).contiguous().view(torch.uint8)


def assert_c_equals_reference(
    code: Code, flat: torch.Tensor, residual: torch.Tensor, table: BlockTable, mode: Mode, key: int = 9
) -> None:
    truth = encoded(block_codes, code, flat, residual, table, mode, key)
    frames = torch.stack((truth.payload, truth.payload.flip(0), truth.payload))  # strided: every second row
    sums = [decoded(block_codes, code, rows, table, len(flat), flat.dtype) for rows in (frames[:1], frames[::2])]
    for level in levels():
        case = (level, code, mode, flat.dtype)
        ours = encoded(blocks, code, flat, residual, table, mode, key)
        assert torch.equal(ours.payload, truth.payload), case
        assert torch.equal(bits(ours.residual), bits(truth.residual)), case
        for rows, total in zip((frames[:1], frames[::2]), sums, strict=True):
            assert torch.equal(bits(decoded(blocks, code, rows, table, len(flat), flat.dtype)), bits(total)), case


def some_blocks(lengths: tuple[int, ...] = LENGTHS) -> list[tuple[int, int, int]]:
    return [(length, max(1, length // 7), 12345 * i - 9999) for i, length in enumerate(lengths)]


def random_flat(size: int, seed: int = 0, spread: int = 4) -> torch.Tensor:
    """Values of mixed sizes, some of them equal."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(size, generator=generator) * 10.0 ** torch.randint(-spread, 2, (size,), generator=generator)
    flat[::5] = flat[::5].round()
    return flat


# The kernels compute what the reference does


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("code", CODES, ids=str)
def test_every_code_dtype_and_mode_gives_the_reference_bits(code: Code, dtype: torch.dtype, mode: Mode) -> None:
    for gap in (0, 3):
        table, size = make_table(code.method, some_blocks(), gap)
        assert_c_equals_reference(code, random_flat(size).to(dtype), random_flat(size, seed=1), table, mode)


@pytest.mark.parametrize("code", CODES, ids=str)
def test_the_largest_block_gives_the_reference_bits(code: Code) -> None:
    for kept in (1, 655, 40000, 65536):
        table, size = make_table(code.method, [(65536, kept, 1), (65535, min(kept, 65535), 2)])
        flat, residual = random_flat(size), random_flat(size, seed=1)
        assert_c_equals_reference(code, flat, residual, table, Mode.FEEDBACK)
        assert_c_equals_reference(code, torch.ones(size), torch.zeros(size), table, Mode.FEEDBACK)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], torch.Tensor, torch.Tensor]:
    """Blocks of random lengths and what is in them: ordinary values with special ones strewn in, or few values."""
    lengths = draw(st.lists(st.integers(1, 150), min_size=1, max_size=5))
    params = draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=len(lengths), max_size=len(lengths)))
    layout = [(n, draw(st.integers(1, n)), param) for n, param in zip(lengths, params, strict=True)]
    flat, residual = (random_flat(sum(lengths), draw(st.integers(0, 99)), spread=6) for _ in range(2))
    if draw(st.booleans()):
        flat, residual = flat.sign(), residual.sign()
    flat *= 2.0 ** draw(st.sampled_from([0, 0, -99, -101, -130, 100, 123]))
    for tensor in (flat, residual):
        for value in draw(st.lists(st.sampled_from(SPECIAL), max_size=3)):
            tensor[draw(st.integers(0, len(tensor) - 1))] = value
    return layout, flat, residual


@settings(max_examples=150, deadline=None)
@given(
    case=cases(),
    code=st.sampled_from(CODES),
    mode=st.sampled_from(Mode),
    dtype=st.sampled_from(DTYPES),
    key=st.integers(0, 2**32 - 1),
)
def test_whatever_is_in_the_blocks_gives_the_reference_bits(
    case: tuple[list[tuple[int, int, int]], torch.Tensor, torch.Tensor],
    code: Code,
    mode: Mode,
    dtype: torch.dtype,
    key: int,
) -> None:
    layout, flat, residual = case
    table, _ = make_table(code.method, layout)
    assert_c_equals_reference(code, flat.to(dtype), residual, table, mode, key)


def test_equal_elements_are_kept_from_the_lower_index_on() -> None:
    flat = torch.tensor([1.0, -2.0, 2.0, 1.0, -1.0, 2.0, 1.0])
    for kept, indices in ((1, [1]), (2, [1, 2]), (4, [0, 1, 2, 5]), (6, [0, 1, 2, 3, 4, 5])):
        table, _ = make_table(Method.TOPK, [(7, kept, 0)])
        assert_c_equals_reference(Code(Method.TOPK, 8), flat, torch.zeros(7), table, Mode.FEEDBACK)
        payload = encoded(blocks, Code(Method.TOPK, 8), flat, flat, table, Mode.NONE).payload
        assert payload[: 2 * kept].view(torch.int16).tolist() == indices


# What a code promises


def through(code: Code, flat: torch.Tensor, residual: torch.Tensor, mode: Mode) -> tuple[torch.Tensor, torch.Tensor]:
    """One block, encoded and decoded: what a receiver sees, and the residual."""
    table, size = make_table(code.method, [(len(flat), max(1, len(flat) // 10), 5)])
    payload, after = encoded(blocks, code, flat, residual, table, mode)
    return decoded(blocks, code, payload[None], table, size, torch.float32), after


@pytest.mark.parametrize("code", CODES, ids=str)
def test_what_was_to_say_is_what_was_sent_plus_the_residual(code: Code) -> None:
    flat, before = random_flat(200), random_flat(200, seed=1)
    sent, after = through(code, flat, before, Mode.FEEDBACK)
    assert torch.equal(after, (flat + before) - sent)
    torch.testing.assert_close(sent + after, flat + before, rtol=2**-23, atol=float(before.abs().max()) * 2**-22)

    sent, after = through(code, flat, before, Mode.ABSORB)
    assert torch.equal(after, before + (flat - sent))


@pytest.mark.parametrize(("method", "levels"), [(Method.INT8, 127), (Method.INT4, 7)], ids=str)
def test_rounding_errs_by_half_a_level_and_dithering_by_less_than_one(method: Method, levels: int) -> None:
    flat = random_flat(256)
    step = float(flat.abs().max()) / levels
    for stochastic, bound in ((False, 0.5), (True, 1.0)):
        sent, _ = through(Code(method, 256, stochastic), flat, flat, Mode.NONE)
        assert float((sent - flat).abs().max()) <= bound * step * (1 + 1e-5)


@pytest.mark.parametrize("code", CODES, ids=str)
def test_a_lost_block_is_seen_and_leaves_the_residual_alone(code: Code) -> None:
    for value in (NAN, INF, -INF, 3e38):
        flat, before = random_flat(100), random_flat(100, seed=1)
        flat[50] = value
        for mode in (Mode.FEEDBACK, Mode.ABSORB):
            sent, after = through(code, flat, before, mode)
            assert torch.equal(after, before)
            assert bool(sent[: 10 if code.method == Method.TOPK else 100].isnan().all())


@pytest.mark.parametrize("code", CODES, ids=str)
def test_a_finite_block_leaves_a_finite_residual(code: Code) -> None:
    largest = float(torch.tensor(2.0**127).nextafter(torch.tensor(0.0)))
    for flat in (torch.full((64,), largest), torch.full((64,), -largest), torch.linspace(-largest, largest, 64)):
        sent, after = through(code, flat, torch.zeros(64), Mode.FEEDBACK)
        assert bool(sent.isfinite().all() and after.isfinite().all())


@pytest.mark.parametrize("code", CODES, ids=str)
def test_zeros_come_back_as_zeros(code: Code) -> None:
    for zero in (0.0, -0.0, 2.0**-101 if code.method != Method.TOPK else 0.0):
        sent, after = through(code, torch.full((40,), zero), torch.zeros(40), Mode.FEEDBACK)
        assert bool((sent == 0).all())
        assert bool((after == zero).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("code", CODES, ids=str)
def test_rows_are_added_in_order_and_what_is_between_blocks_stays(code: Code, dtype: torch.dtype) -> None:
    table, size = make_table(code.method, some_blocks(), gap=2)
    payloads = torch.stack(
        [encoded(blocks, code, random_flat(size, seed), torch.zeros(size), table, Mode.NONE).payload for seed in range(5)]
    )
    inside = torch.zeros(size, dtype=torch.bool)
    for start, length, *_ in table.rows.tolist():
        inside[start : start + length] = True
    rows = [decoded(blocks, code, payload[None], table, size, torch.float32) for payload in payloads]
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    ours = decoded(blocks, code, payloads, table, size, dtype)
    assert torch.equal(ours[inside], total[inside].to(dtype))
    assert bool((ours[~inside] == 77).all())


# Dithering


def test_dither_is_the_hash_that_the_note_names() -> None:
    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
        x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    for key, param, index in ((0, 0, 0), (1, 2, 3), (2**32 - 1, 2**31, 2**31 + 7), (77, 2**32 - 1, 2**32 - 1)):
        ours = block_codes.dither(key, torch.tensor(param), torch.tensor(index))
        assert int(ours) == mix(index ^ mix(param ^ mix(key)))


@pytest.mark.parametrize("method", [Method.INT8, Method.INT4], ids=str)
def test_dithered_codes_are_right_on_average(method: Method) -> None:
    """Fixed keys: the same numbers every time. A mean of 4096 has a standard error below 0.008 of a level."""
    flat = torch.linspace(-1, 1, 64)
    table, _ = make_table(method, [(64, 0, 3)])
    total = torch.zeros(64, dtype=torch.float64)
    for key in range(4096):
        payload = encoded(blocks, Code(method, 64, True), flat, flat, table, Mode.NONE, key).payload
        total += decoded(blocks, Code(method, 64, True), payload[None], table, 64, torch.float32)
    step = 1 / 127 if method == Method.INT8 else 1 / 7
    assert float((total / 4096 - flat).abs().max()) < 5 * 0.008 * step


def test_dithering_depends_on_key_parameter_and_place() -> None:
    flat = torch.full((64,), 0.5)
    flat[0] = 127.0
    seen = set()
    for key, param, first in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
        table, _ = make_table(Method.INT8, [(64, 0, param)])
        table.rows[0, blocks.FIRST] = first
        payload = encoded(blocks, Code(Method.INT8, 64, True), flat, flat, table, Mode.NONE, key).payload
        seen.add(tuple(payload.tolist()))
    assert len(seen) == 4


# The door


@pytest.mark.parametrize("code", CODED_BY_SCALE, ids=str)
def test_without_the_library_the_reference_serves(code: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    table, size = make_table(code.method, some_blocks())
    flat, residual = random_flat(size), random_flat(size, seed=1)
    ours = encoded(blocks, code, flat, residual, table, Mode.FEEDBACK)
    monkeypatch.setattr(blocks, "load", lambda: None)
    theirs = encoded(blocks, code, flat, residual, table, Mode.FEEDBACK)
    assert torch.equal(ours.payload, theirs.payload)
    assert torch.equal(ours.residual, theirs.residual)


def test_an_empty_table_writes_nothing() -> None:
    table = BlockTable(torch.empty(0, 7, dtype=torch.int32), nbytes=0)
    payload = torch.full((16,), 0xAA, dtype=torch.uint8)
    for by in (blocks, block_codes):
        by.encode(Code(Method.INT8, 256), torch.ones(3), None, table, payload, Mode.NONE, 0)
        flat = decoded(by, Code(Method.INT8, 256), payload[None], table, 3, torch.float32)
        assert flat.tolist() == [77.0] * 3
    assert bool((payload == 0xAA).all())
