"""Tensors of a GPU on gloo: staged in pieces, summed by every algorithm, on one host and on two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradsync as gs
from gradsync.transport.host_meeting import declare_host

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="There is no GPU on this machine.")


def reduce_on_the_device(hosts: list[str] | None) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if hosts is not None:
        declare_host(hosts[rank])
    algorithms = [None, gs.native(), gs.ring(), gs.tree(), gs.halving_doubling(), gs.hierarchical()]
    for algorithm in [*algorithms, gs.shared_memory()] if hosts is None else algorithms:
        for dtype in (torch.float32, torch.bfloat16):
            for numel in (0, 1, 1000, 5_000_001):  # the last takes several pieces
                tensor = (torch.arange(numel, device="cuda") % 7 + rank).to(dtype)
                expected = ((torch.arange(numel, device="cuda") % 7) * size + size * (size - 1) // 2).to(dtype)
                assert torch.equal(gs.all_reduce(tensor, algorithm=algorithm, op="sum"), expected), (algorithm, numel)
    declare_host(None)


def test_tensors_of_a_gpu_on_gloo_are_summed_by_every_algorithm(run: Callable[..., Any]) -> None:
    run(reduce_on_the_device, None, ranks=2, timeout=120)
    run(reduce_on_the_device, ["a", "a", "b", "b"], ranks=4, timeout=120)
