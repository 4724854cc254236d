"""Triton's block codes against the torch reference, with Triton's own interpreter in the place of a GPU.

Run by `test_interpreted_blocks.py` in a process of its own, as `python interpreted_driver.py METHOD BLOCK`: the
interpreter is chosen when Triton is imported. Ends with 1 at the first difference; a kernel that never ends is for the
caller's time limit.

Note [Not as on a GPU]
    The interpreter cuts fp32 where it becomes bf16, loses bf16's smallest numbers, and spreads a truth over a block as
    int32, which is no mask. Here it rounds to the nearest even number, keeps them, and keeps the truth's type. The
    bound of a loop is an array of one element to it, which NumPy from 2.5 on takes for no integer: here it is one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from block_tables import LENGTHS, bits, decoded, encoded, make_table, random_flat
from triton.runtime import interpreter

from gradsync.kernels import block_torch, block_triton
from gradsync.kernels.block_kernels import BlockTable, Code, Method, Mode

INF, NAN = float("inf"), float("nan")
SPECIAL = (0.0, -0.0, 1e-45, -1e-39, 2**-101, 2**-100, 1e30, 2.0**126, 2.0**127, 3.4e38, -3.4e38, INF, -INF, NAN)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def correct_interpreter() -> None:
    """See [Not as on a GPU]."""
    builder, language = interpreter.InterpreterBuilder, interpreter.tl
    cast = builder.cast_impl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == language.float32 and dst_type.scalar == language.bfloat16:
            nearest = torch.from_numpy(np.array(src.data)).bfloat16().view(torch.int16).numpy().view(np.uint16)
            return interpreter.TensorHandle(nearest, language.bfloat16)
        if src.dtype.scalar == language.bfloat16 and dst_type.scalar == language.float32:
            return interpreter.TensorHandle((src.data.astype(np.uint32) << 16).view(np.float32), language.float32)
        return cast(self, src, dst_type)

    def create_splat(_: Any, kind: Any, arg: Any) -> Any:
        return interpreter.TensorHandle(np.full(kind.shape, arg.data, dtype=arg.data.dtype), arg.dtype.scalar)

    builder.cast_impl, builder.create_splat = cast_impl, create_splat
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patch_tensor


def shapes(method: Method, block: int) -> Iterator[list[tuple[int, int, int]]]:
    """Whole blocks and short ones, with few and many of their elements kept."""
    short = [(n, kept, n) for n in range(1, 6) for kept in range(1, n + 1)]
    lengths = [n for n in (*LENGTHS[::3], 513, 1023) if n <= block]
    for share in (0.01, 0.3, 0.51, 1.0) if method == Method.TOPK else (1.0,):
        others = [(n, max(1, int(n * share)), 3 * n) for n in lengths]
        yield [(block, max(1, int(block * share)), 5), *others, *short]
        short = []


def contents(size: int) -> Iterator[torch.Tensor]:
    """Numbers of all sizes; ties everywhere; next to nothing but zeros; and what is special, strewn."""
    yield random_flat(size)
    yield torch.ones(size)
    few = torch.zeros(size)
    few[3::97] = -1e-3
    yield few
    strewn = random_flat(size, seed=3).round()
    for i, value in enumerate(SPECIAL):
        strewn[(i * (size // 17) + 7 * i) % size] = value
    yield strewn


def assert_same(code: Code, flat: torch.Tensor, residual: torch.Tensor, table: BlockTable, mode: Mode) -> None:
    case = (code, flat, residual, table, mode, 2**32 - 1)
    truth, ours = encoded(block_torch, *case), encoded(block_triton, *case)
    assert torch.equal(ours.payload, truth.payload), case
    assert torch.equal(bits(ours.residual), bits(truth.residual)), case
    payloads = torch.stack((truth.payload, truth.payload))
    expected = decoded(block_torch, code, payloads, table, len(flat), flat.dtype)
    sums = decoded(block_triton, code, payloads, table, len(flat), flat.dtype)
    assert torch.equal(bits(sums), bits(expected)), case


def main(method: Method, block: int) -> None:
    correct_interpreter()
    number = 0
    for blocks in shapes(method, block):
        for gap in (0, 3):  # whole tiles on borders, and none
            table, size = make_table(method, blocks, gap)
            for flat in contents(size):
                code = Code(method, block, number % 2 == 1 and method in (Method.INT8, Method.INT4))
                dtype, mode = DTYPES[number // 3 % 3], Mode(number % 3)
                assert_same(code, flat.to(dtype), random_flat(size, seed=1), table, mode)
                number += 1
    print(f"{number} equal")


if __name__ == "__main__":
    np.seterr(all="ignore")
    main(Method[sys.argv[1]], int(sys.argv[2]))
