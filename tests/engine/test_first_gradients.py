"""The digest of the first gradients: one number per parameter, in little memory however large the parameter."""

from __future__ import annotations

import hashlib
import struct

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from gradsync.engine.bucket import GradEntry
from gradsync.engine.nonfinite import NO_DIGEST, digest_of

MANY = 5_000_000


def entry(grad: torch.Tensor) -> GradEntry:
    param = nn.Parameter(torch.zeros_like(grad))
    param.grad = grad
    return GradEntry(0, "w", param, {}, "w", False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numel", [1, 3, MANY])
def test_it_is_the_sum_of_all_bits(dtype: torch.dtype, numel: int) -> None:
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    total = int(grad.view(bits).sum(dtype=torch.int64))
    assert digest_of([entry(grad)]) == hashlib.blake2b(struct.pack("<q", total), digest_size=8).digest()


def test_of_zeros_there_is_none() -> None:
    assert digest_of([entry(torch.zeros(7)), entry(torch.zeros(0))]) == NO_DIGEST


def test_it_needs_less_memory_than_the_gradient() -> None:
    entries = [entry(torch.ones(MANY))]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as memory:
        digest_of(entries)
    assert 0 < peak(memory) < MANY * 4


def peak(memory: profile) -> int:
    """The most bytes that were allocated at once."""
    most = now = 0
    for event in memory.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most
