"""On a GPU: phases and buckets are told by events, and no step waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs
from gradsync.trace.lines import arrived_by
from gradsync.trace.reader import RankTrace, read_run
from silent_device import host_never_waits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="There is no GPU on this machine.")

STEPS = 30


def _model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(6)]).cuda()


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, silent: bool) -> float:
    """Train; seconds from the third step to the last. `silent`: a step that waits for the device is an error."""
    batch = torch.randn(4096, 1024, device="cuda")
    begun = 0.0
    for step in range(STEPS):
        if step == 3:
            torch.cuda.synchronize()
            begun = time.perf_counter()
        with host_never_waits() if silent and step >= 3 else nullcontext():
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def _check(trace: RankTrace, took_s: float) -> None:
    assert [step.step for step in trace.steps] == list(range(STEPS))
    later = trace.steps[3:]
    for step in later:
        assert min(step.seconds(name) for name in ("forward", "backward", "optimizer")) > 0
        assert sum(phase.seconds for phase in step.phases) <= step.step_s * 1.01 + 1e-4
    assert sum(step.step_s for step in later) == pytest.approx(took_s, rel=0.25)
    for bucket in later[-1].buckets or []:
        assert bucket.launched is not None
        done = arrived_by(bucket)
        assert done is not None
        assert bucket.launched <= done + 1e-5


def check_nccl(folder: str) -> float:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    sync = gs.attach(model, optimizer, gs.Plan(bucket_bytes=1 << 22), trace=folder)
    took_s = _train(model, optimizer, silent=True)
    sync.detach()
    return took_s


def test_a_traced_step_on_nccl_never_waits_for_the_device(tmp_path: Path) -> None:
    [took_s] = gs.spawn(_on_nccl, 1, check_nccl, str(tmp_path), timeout=120)
    _check(read_run(tmp_path).ranks[0], took_s)


def _on_nccl(check: Callable[[str], float], folder: str) -> float:
    dist.destroy_process_group()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    torch.cuda.set_device(0)
    return check(folder)


def check_gloo(folder: str, compress: bool) -> float:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    plan = gs.Plan(bucket_bytes=1 << 22, compress=gs.int8() if compress else None)
    sync = gs.attach(model, optimizer, plan, trace=folder)
    took_s = _train(model, optimizer, silent=False)
    sync.detach()
    return took_s


@pytest.mark.parametrize("compress", [False, True])
def test_two_ranks_on_one_gpu_tell_of_their_steps(run: Callable[..., Any], tmp_path: Path, compress: bool) -> None:
    took_s = run(check_gloo, str(tmp_path), compress, timeout=120)
    for rank, trace in read_run(tmp_path).ranks.items():
        _check(trace, took_s[rank])
        assert (trace.steps[-1].encode_s > 0) == compress


def test_two_ranks_over_nccl_tell_of_their_steps(nccl: Callable[..., Any], tmp_path: Path) -> None:
    took_s = nccl(check_gloo, str(tmp_path), True, timeout=120)
    for rank, trace in read_run(tmp_path).ranks.items():
        _check(trace, took_s[rank])
        assert trace.steps[-1].encode_s > 0


def check_observed(folder: str) -> float:
    ddp = DistributedDataParallel(_model(), bucket_cap_mb=4)
    observer = gs.observe(ddp, trace=folder)
    took_s = _train(ddp, torch.optim.AdamW(ddp.parameters()), silent=False)
    observer.close()
    return took_s


def test_ddp_on_nccl_is_observed(tmp_path: Path) -> None:
    [took_s] = gs.spawn(_on_nccl, 1, check_observed, str(tmp_path), timeout=120)
    _check(read_run(tmp_path).ranks[0], took_s)
