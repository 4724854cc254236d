"""What does the gradsync backend buy stock scripts? Collectives, and steps of DDP and FSDP, through gloo and gradsync.

python benchmarks/backend/main.py              # 2 and 4 ranks on this machine
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import bench_harness  # noqa: E402
import gradsync as gs  # noqa: E402
import gradsync.backend  # noqa: E402

SIZES = [1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 25_000_000, 100_000_000]  # bytes
MODELS = {"many small": (40, 64, 64), "few large": (4, 1024, 32)}  # layers, width, batch
BACKENDS = ("gloo", "gradsync")


def groups() -> dict[str, dist.ProcessGroup]:
    return {name: dist.new_group(backend=name) for name in BACKENDS}


def repeating(collective: Callable[[], object], repeats: int) -> Callable[[], float]:
    """Seconds of one collective; every rank begins a turn together."""

    def turn() -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            collective()
        return (time.perf_counter() - start) / repeats

    return turn


def collectives(nbytes: int) -> dict[str, Callable[[dist.ProcessGroup], object]]:
    """The collectives, each of a whole of so many bytes."""
    whole = torch.zeros(nbytes // 4)
    part = torch.zeros(whole.numel() // dist.get_world_size())
    whole = whole[: part.numel() * dist.get_world_size()]
    return {
        "all_reduce": lambda group: dist.all_reduce(whole, group=group),
        "all_gather": lambda group: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda group: dist.reduce_scatter_tensor(part, whole, group=group),
    }


def training(model: nn.Module, forward: nn.Module, x: torch.Tensor) -> Callable[[], float]:
    """Seconds of a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def turn() -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(3):
            forward(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.perf_counter() - start) / 3

    return turn


def network(layers: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())))


def measure_collectives(rounds: int) -> dict[str, Any]:
    by_backend, cells = groups(), {}

    def fill(name: str, collective: Callable[[dist.ProcessGroup], object], repeats: int) -> None:
        arms = {backend: repeating(partial(collective, group), repeats) for backend, group in by_backend.items()}
        bench_harness.interleave(arms, 2)
        cells[name] = bench_harness.rounded(bench_harness.interleave(arms, rounds))

    for nbytes in SIZES:
        for name, collective in collectives(nbytes).items():
            fill(f"{name} {nbytes}", collective, max(1, min(50, 4_000_000 // nbytes)))
    # What gloo does in both: what handing it on costs.
    fill("broadcast 1024", lambda group: dist.broadcast(torch.zeros(256), 0, group=group), 50)
    return cells


def with_ddp(model: nn.Sequential, group: dist.ProcessGroup) -> nn.Module:
    return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)


def with_fsdp(model: nn.Sequential, group: dist.ProcessGroup) -> nn.Module:
    """By layer, as one would."""
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def measure_steps(rounds: int) -> dict[str, Any]:
    by_backend, cells = groups(), {}
    for name, (layers, width, batch) in MODELS.items():
        x = torch.randn(batch, width, generator=torch.Generator().manual_seed(dist.get_rank()))
        for how, wrap in (("DDP", with_ddp), ("FSDP", with_fsdp)):
            plain = network(layers, width)
            arms = {"no sync": training(plain, plain, x)}
            for backend, group in by_backend.items():
                model = network(layers, width)
                forward = wrap(model, group)
                arms[backend] = training(model, forward, x)
            bench_harness.interleave(arms, 2)
            cells[f"{how} {name}"] = bench_harness.rounded(bench_harness.interleave(arms, rounds))
    return cells


def row(name: str, samples: bench_harness.Samples) -> list[str]:
    ratio, low, high = bench_harness.paired_ratio(samples, "gloo", "gradsync")
    plain = bench_harness.milliseconds(samples["no sync"]) if "no sync" in samples else "–"
    times = [f"{1e3 * median(samples[arm]):.3f}" for arm in BACKENDS]
    return [name, plain, *times, f"**{ratio:.1f}×** ({low:.1f}–{high:.1f})"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    parser.add_argument("--commit", default=bench_harness.commit(HERE), help="what is measured, outside of a clone")
    arguments = parser.parse_args()
    facts: dict[str, Any] = {"machine": bench_harness.machine(), "commit": arguments.commit}
    facts |= {"load_before": round(os.getloadavg()[0], 2), "cells": {}}
    for ranks in arguments.ranks:
        cells = gs.spawn(measure_collectives, ranks, arguments.rounds, timeout=900)[0]
        cells |= gs.spawn(measure_steps, ranks, arguments.rounds, timeout=900)[0]
        facts["cells"][f"{ranks} ranks"] = cells
        rows = [row(name, samples) for name, samples in cells.items()]
        print(f"\n{ranks} ranks, ms, median (and of gloo / gradsync within a round, with quartiles)\n")
        print(bench_harness.table(["what", "no sync", *BACKENDS, "gloo / gradsync"], rows), flush=True)
    bench_harness.save(arguments.out, {f"{facts['machine']['cores']} cores": facts})  # each machine beside the others


if __name__ == "__main__":
    main()
