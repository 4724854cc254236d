"""PyTorch's own PowerSGD hook breaks with several buckets on gloo; ours must not.

Its second round is launched from a callback of the first, so the order of collectives depends on which round ends
first, on each rank. Gloo then pairs messages of different sizes, and aborts the process. It is kept as a test
because it is why our rounds are interleaved by the buckets' order alone: see `desk`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_powersgd
from ddp_training import assert_replicas_equal, wrap

import gradsync as gs

STEPS = 30
PATIENCE_S = 12  # instead of an abort both ranks may wait for ever


def test_torchs_own_powersgd_hook_breaks_with_two_buckets(tmp_path: Path) -> None:
    texts = [tmp_path / f"rank-{rank}.txt" for rank in range(2)]
    ranks = [_start(rank, tmp_path / "store", text) for rank, text in enumerate(texts)]
    codes = _codes(ranks)
    said = "\n".join(text.read_text() for text in texts)
    if codes == [0, 0]:
        pytest.skip(f"PyTorch {torch.__version__} came through {STEPS} steps of PowerSGD with several buckets on gloo")
    assert "step 1\n" in said, f"it broke before its first compressed step:\n{said}"


def _start(rank: int, store: Path, text: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, torch_powersgd.__file__, str(rank), str(store), str(STEPS)]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with text.open("w") as file:
        return subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)


def _codes(ranks: list[subprocess.Popen[bytes]]) -> list[int | None]:
    """How each ended by itself, until one has failed or nobody comes further; None for the others."""
    deadline = time.monotonic() + PATIENCE_S
    codes: list[int | None] = [None, None]
    while not all(code == 0 for code in codes) and not any(codes) and time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            ranks[codes.index(None)].wait(0.2)
        codes = [rank.poll() for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.wait()
    return codes


def ours_comes_through() -> None:
    model = torch_powersgd.build()
    ddp, state = wrap(model, gs.Plan(compress=gs.powersgd(2)), bucket_cap_mb=torch_powersgd.BUCKET_CAP_MB)
    assert state is not None
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        ddp(torch.randn(8, 64, generator=generator)).square().mean().backward()
    assert state.stats()["num_buckets"] >= 4
    assert_replicas_equal({name: param.grad for name, param in model.named_parameters() if param.grad is not None})
    state.close()


@pytest.mark.parametrize("ranks", [2, 4])
def test_our_powersgd_comes_through_with_the_same_buckets(ranks: int, run: Callable[..., list[Any]]) -> None:
    run(ours_comes_through, ranks=ranks)
