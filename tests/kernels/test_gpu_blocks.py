"""Triton's block codes equal the torch reference on the CPU bit for bit."""

from __future__ import annotations

import pytest
import torch
from block_tables import CODES, LENGTHS, bits, encoded, make_table, random_flat, round_up, some_blocks

from gradsync.kernels import block_kernels, block_torch
from gradsync.kernels.block_kernels import BlockTable, Code, Method, Mode
from silent_device import host_never_waits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INF, NAN = float("inf"), float("nan")
SPECIAL = (0.0, -0.0, 1e-45, -1e-39, 2**-101, 2**-100, 1e30, 2.0**126, 2.0**127, 3.4e38, -3.4e38, INF, -INF, NAN)


def assert_triton_equals_reference(
    code: Code, flat: torch.Tensor, residual: torch.Tensor, table: BlockTable, mode: Mode, key: int = 9
) -> None:
    truth = encoded(block_torch, code, flat, residual, table, mode, key)
    there = BlockTable(table.rows.cuda(), table.nbytes)
    payload = torch.full((round_up(table.nbytes, 16),), 0xAA, dtype=torch.uint8, device="cuda")
    after = residual.cuda()
    block_kernels.encode(code, flat.cuda(), None if mode == Mode.NONE else after, there, payload, mode, key)
    assert torch.equal(payload.cpu(), truth.payload)
    assert torch.equal(bits(after.cpu()), bits(truth.residual))
    other = encoded(block_torch, code, flat.flip(0), residual, table, Mode.NONE, key).payload
    payloads = torch.stack((truth.payload, other, other, truth.payload))
    for chosen in (slice(1), slice(None, None, 2), slice(None)):
        expected, ours = torch.full_like(flat, 77.0), torch.full_like(flat, 77.0).cuda()
        block_torch.decode(code, payloads[chosen], table, expected)
        block_kernels.decode(code, payloads.cuda()[chosen], there, ours)
        assert torch.equal(bits(ours.cpu()), bits(expected)), chosen


def strewn(flat: torch.Tensor, block: int) -> torch.Tensor:
    """With a special value in every second block, a block of each zero, and one with a single value."""
    for i, value in enumerate(SPECIAL):
        flat[(2 * i * block + 7 * i) % len(flat)] = value
    flat[block : 2 * block] = 0.0
    flat[3 * block : 4 * block] = -0.0
    flat[5 * block : 6 * block] = -0.75
    return flat


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("code", CODES, ids=str)
def test_every_code_dtype_and_mode_gives_the_reference_bits(code: Code, dtype: torch.dtype, mode: Mode) -> None:
    lengths = (256,) * 45 + LENGTHS + (256,) * 9
    for gap in (0, 3):  # whole tiles on borders, and none
        table, size = make_table(code.method, some_blocks(lengths), gap)
        flat, residual = random_flat(size), random_flat(size, seed=1)
        assert_triton_equals_reference(code, flat.to(dtype), residual, table, mode)
        assert_triton_equals_reference(code, strewn(flat, 256 + gap).to(dtype), residual, table, mode, key=2**32 - 1)


@pytest.mark.parametrize("block", [16, 64, 1024, 65536])
@pytest.mark.parametrize("method", Method)
def test_blocks_of_every_size_give_the_reference_bits(method: Method, block: int) -> None:
    for kept in (1, max(1, block // 100), block // 2 + 1, block):
        sizes = [(block, kept, 5)] * 5 + [(block - 1, min(kept, block - 1), 6), (3, 2, 7), (block, kept, 8)]
        table, size = make_table(method, sizes)
        flat, residual = random_flat(size), random_flat(size, seed=1)
        assert_triton_equals_reference(Code(method, block), flat, residual, table, Mode.FEEDBACK)
        assert_triton_equals_reference(Code(method, block), torch.ones(size), residual.sign(), table, Mode.FEEDBACK)
        if method != Method.TOPK:
            break


def test_the_host_never_waits_for_the_device() -> None:
    table, size = make_table(Method.TOPK, some_blocks())
    there = BlockTable(table.rows.cuda(), table.nbytes)
    flat, residual = random_flat(size).cuda(), torch.zeros(size).cuda()
    payload = torch.zeros(1, table.nbytes, dtype=torch.uint8, device="cuda")
    with host_never_waits():
        block_kernels.encode(Code(Method.TOPK, 256), flat, residual, there, payload[0], Mode.FEEDBACK, 0)
        block_kernels.decode(Code(Method.TOPK, 256), payload, there, flat)
