"""The C block codes equal the torch reference bit for bit, on every instruction set that this processor has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from block_tables import CODES, DTYPES, bits, decoded, encoded, make_table, random_flat, some_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.kernels import block_kernels, block_torch
from gradsync.kernels.block_kernels import BlockTable, Code, Method, Mode
from gradsync.kernels.library import load

LEVELS = ("portable", "avx2", "avx512")
INF, NAN = float("inf"), float("nan")
SPECIAL = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    1e-45,
    -1e-45,
    1e-39,
    2**-101,
    2**-100,
    1e30,
    2.0**126,
    3.4e38,
    -3.4e38,
    INF,
    -INF,
    NAN,
)


def levels() -> Iterator[str]:
    """Every instruction set that is here, in use while the loop's body runs; the widest again afterwards."""
    library = load()
    if library is None:
        pytest.skip("the C library was not built")
    try:
        for level in LEVELS:
            if library.gradsync_use_level(level.encode()):
                yield level
    finally:
        library.gradsync_use_level(b"")


def assert_c_equals_reference(
    code: Code, flat: torch.Tensor, residual: torch.Tensor, table: BlockTable, mode: Mode, key: int = 9
) -> None:
    truth = encoded(block_torch, code, flat, residual, table, mode, key)
    frames = torch.stack((truth.payload, truth.payload.flip(0), truth.payload))  # strided: every second row
    sums = [decoded(block_torch, code, rows, table, len(flat), flat.dtype) for rows in (frames[:1], frames[::2])]
    for level in levels():
        case = (level, code, mode, flat.dtype)
        ours = encoded(block_kernels, code, flat, residual, table, mode, key)
        assert torch.equal(ours.payload, truth.payload), case
        assert torch.equal(bits(ours.residual), bits(truth.residual)), case
        for rows, total in zip((frames[:1], frames[::2]), sums, strict=True):
            assert torch.equal(bits(decoded(block_kernels, code, rows, table, len(flat), flat.dtype)), bits(total)), (
                case
            )


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
    for kept in (1, 655, 40000, 65536) if code.method == Method.TOPK else (1,):  # nobody else drops any
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


# The door


@pytest.mark.parametrize("code", CODES, ids=str)
def test_without_the_library_the_reference_serves(code: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    table, size = make_table(code.method, some_blocks())
    flat, residual = random_flat(size), random_flat(size, seed=1)
    ours = encoded(block_kernels, code, flat, residual, table, Mode.FEEDBACK)
    monkeypatch.setattr(block_kernels, "load", lambda: None)
    theirs = encoded(block_kernels, code, flat, residual, table, Mode.FEEDBACK)
    assert torch.equal(ours.payload, theirs.payload)
    assert torch.equal(ours.residual, theirs.residual)


def test_an_empty_table_writes_nothing() -> None:
    table = BlockTable(torch.empty(0, 7, dtype=torch.int32), nbytes=0)
    payload = torch.full((16,), 0xAA, dtype=torch.uint8)
    for by in (block_kernels, block_torch):
        by.encode(Code(Method.INT8, 256), torch.ones(3), None, table, payload, Mode.NONE, 0)
        flat = decoded(by, Code(Method.INT8, 256), payload[None], table, 3, torch.float32)
        assert flat.tolist() == [77.0] * 3
    assert bool((payload == 0xAA).all())
