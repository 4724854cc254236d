"""What every block code promises: where its bytes are, what it loses, what becomes of NaN, how rows are added."""

from __future__ import annotations

import pytest
import torch
from block_tables import CODES, DTYPES, decoded, encoded, make_table, random_flat, some_blocks

from gradsync.kernels import block_kernels, block_torch
from gradsync.kernels.block_kernels import Code, Method, Mode

INF, NAN = float("inf"), float("nan")


def payload_of(code: Code, values: list[float], kept: int = 0) -> tuple[torch.Tensor, list[int]]:
    """One block's head, in 16 bytes, and the bytes of its body."""
    table, _ = make_table(code.method, [(len(values), kept, 0)])
    payload = encoded(block_kernels, code, torch.tensor(values), torch.empty(0), table, Mode.NONE).payload
    return payload[:16], payload[16:].tolist()


# Bytes


def test_int8_has_a_byte_for_each_element() -> None:
    head, body = payload_of(Code(Method.INT8, 8), [-254.0, 2.0, 3.0, 5.0, -1.1])  # 1.5 and 2.5 go to the even 2
    assert head[:4].view(torch.float32).item() == 2.0
    assert body == [256 - 127, 1, 2, 2, 256 - 1] + [0] * 11


def test_int4_has_the_first_half_in_low_bits_and_the_second_in_high_ones() -> None:
    head, body = payload_of(Code(Method.INT4, 64), [-7.0, 1.0, *[0.0] * 30, 5.0, -3.0])
    assert head[:4].view(torch.float32).item() == 1.0
    assert body == [8 - 7 | 8 + 5 << 4, 8 + 1 | 8 - 3 << 4] + [0x88] * 30


def test_sign_has_a_bit_for_each_element_and_their_mean_size() -> None:
    head, body = payload_of(Code(Method.SIGN, 16), [4.0, -2.0, 0.0, -0.0, 1.0, 1.0, -1.0, -1.0, 8.0, -2.0])
    assert head[:4].view(torch.float32).item() == 2.0
    assert body == [0b00110101, 0b01] + [0] * 14


def test_equal_elements_are_kept_from_the_lower_index_on() -> None:
    flat = torch.tensor([1.0, -2.0, 2.0, 1.0, -1.0, 2.0, 1.0])
    for kept, indices in ((1, [1]), (2, [1, 2]), (4, [0, 1, 2, 5]), (6, [0, 1, 2, 3, 4, 5])):
        table, _ = make_table(Method.TOPK, [(7, kept, 0)])
        payload = encoded(block_kernels, Code(Method.TOPK, 8), flat, flat, table, Mode.NONE).payload
        assert payload[: 2 * kept].view(torch.int16).tolist() == indices
        assert payload[16 : 16 + 2 * kept].view(torch.bfloat16).tolist() == flat[indices].tolist()


# What a code promises


def through(code: Code, flat: torch.Tensor, residual: torch.Tensor, mode: Mode) -> tuple[torch.Tensor, torch.Tensor]:
    """One block, encoded and decoded: what a receiver sees, and the residual."""
    table, size = make_table(code.method, [(len(flat), max(1, len(flat) // 10), 5)])
    payload, after = encoded(block_kernels, code, flat, residual, table, mode)
    return decoded(block_kernels, code, payload[None], table, size, torch.float32), after


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
        [
            encoded(block_kernels, code, random_flat(size, seed), torch.zeros(size), table, Mode.NONE).payload
            for seed in range(5)
        ]
    )
    inside = torch.zeros(size, dtype=torch.bool)
    for start, length, *_ in table.rows.tolist():
        inside[start : start + length] = True
    rows = [decoded(block_kernels, code, payload[None], table, size, torch.float32) for payload in payloads]
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    ours = decoded(block_kernels, code, payloads, table, size, dtype)
    assert torch.equal(ours[inside], total[inside].to(dtype))
    assert bool((ours[~inside] == 77).all())


# Dithering


def test_dither_is_the_hash_that_the_note_names() -> None:
    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
        x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
        return x ^ x >> 16

    for key, param, index in ((0, 0, 0), (1, 2, 3), (2**32 - 1, 2**31, 2**31 + 7), (77, 2**32 - 1, 2**32 - 1)):
        ours = block_torch.dither(key, torch.tensor(param), torch.tensor(index))
        assert int(ours) == mix(index ^ mix(param ^ mix(key)))


@pytest.mark.parametrize("method", [Method.INT8, Method.INT4], ids=str)
def test_dithered_codes_are_right_on_average(method: Method) -> None:
    """Fixed keys: the same numbers every time. A mean of 4096 has a standard error below 0.008 of a level."""
    flat = torch.linspace(-1, 1, 64)
    table, _ = make_table(method, [(64, 0, 3)])
    total = torch.zeros(64, dtype=torch.float64)
    for key in range(4096):
        payload = encoded(block_kernels, Code(method, 64, True), flat, flat, table, Mode.NONE, key).payload
        total += decoded(block_kernels, Code(method, 64, True), payload[None], table, 64, torch.float32)
    step = 1 / 127 if method == Method.INT8 else 1 / 7
    assert float((total / 4096 - flat).abs().max()) < 5 * 0.008 * step


def test_dithering_depends_on_key_parameter_and_place() -> None:
    flat = torch.full((64,), 0.5)
    flat[0] = 127.0
    seen = set()
    for key, param, first in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)):
        table, _ = make_table(Method.INT8, [(64, 0, param)])
        table.rows[0, block_kernels.FIRST] = first
        payload = encoded(block_kernels, Code(Method.INT8, 64, True), flat, flat, table, Mode.NONE, key).payload
        seen.add(tuple(payload.tolist()))
    assert len(seen) == 4
