"""Triton's block codes equal the torch reference bit for bit and always end, where no GPU is at hand.

The GPU's own runs are in `test_gpu_blocks.py`. Here Triton's interpreter runs the same kernels on the CPU, where Triton
is installed (`pip install triton`, or what a CUDA build of torch brings along).
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from gradsync.kernels.block_kernels import Method

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, whose interpreter runs the kernels")


@pytest.mark.parametrize("block", [16, 128, 1024])
@pytest.mark.parametrize("method", Method, ids=lambda method: method.name)
def test_interpreted_kernels_end_and_give_the_reference_bits(method: Method, block: int) -> None:
    # A loop without an end shows as a time-out, or as a stride that has outgrown int32.
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(Path(__file__).with_name("interpreted_driver.py")),
        method.name,
        str(block),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.endswith(" equal\n")
