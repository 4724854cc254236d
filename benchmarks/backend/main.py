"""What does the gradsync backend buy stock scripts? all_reduce and a DDP step through gloo and through gradsync.

python benchmarks/backend/main.py              # 2 and 4 ranks on this machine
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
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


def summing(group: dist.ProcessGroup, tensor: torch.Tensor, repeats: int) -> Callable[[], float]:
    """Seconds of one all_reduce; every rank begins a turn together."""

    def turn() -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            dist.all_reduce(tensor, group=group)
        return (time.perf_counter() - start) / repeats

    return turn


def broadcasting(group: dist.ProcessGroup, tensor: torch.Tensor, repeats: int) -> Callable[[], float]:
    """The same for what gloo does in both: what handing it on costs."""

    def turn() -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            dist.broadcast(tensor, 0, group=group)
        return (time.perf_counter() - start) / repeats

    return turn


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


def network(layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())))


def measure_sums(rounds: int) -> dict[str, Any]:
    by_backend, cells = groups(), {}
    for nbytes in SIZES:
        tensor, repeats = torch.zeros(nbytes // 4), max(1, min(50, 4_000_000 // nbytes))
        arms = {name: summing(group, tensor, repeats) for name, group in by_backend.items()}
        bench_harness.interleave(arms, 2)
        cells[f"all_reduce {nbytes}"] = bench_harness.rounded(bench_harness.interleave(arms, rounds))
    arms = {name: broadcasting(group, torch.zeros(256), 50) for name, group in by_backend.items()}
    cells["broadcast 1024"] = bench_harness.rounded(bench_harness.interleave(arms, rounds))
    return cells


def measure_steps(rounds: int) -> dict[str, Any]:
    by_backend, cells = groups(), {}
    for name, (layers, width, batch) in MODELS.items():
        x = torch.randn(batch, width, generator=torch.Generator().manual_seed(dist.get_rank()))
        plain = network(layers, width)
        arms = {"no sync": training(plain, plain, x)}
        for backend, group in by_backend.items():
            model = network(layers, width)
            ddp = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
            arms[backend] = training(model, ddp, x)
        bench_harness.interleave(arms, 2)
        cells[f"DDP {name}"] = bench_harness.rounded(bench_harness.interleave(arms, rounds))
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
    facts: dict[str, Any] = {"machine": bench_harness.machine(), "commit": arguments.commit, "cells": {}}
    for ranks in arguments.ranks:
        cells = gs.spawn(measure_sums, ranks, arguments.rounds, timeout=900)[0]
        cells |= gs.spawn(measure_steps, ranks, arguments.rounds, timeout=900)[0]
        facts["cells"][f"{ranks} ranks"] = cells
        rows = [row(name, samples) for name, samples in cells.items()]
        print(f"\n{ranks} ranks, ms, median (and of gloo / gradsync within a round, with quartiles)\n")
        print(bench_harness.table(["what", "no sync", *BACKENDS, "gloo / gradsync"], rows), flush=True)
    bench_harness.save(arguments.out, {f"{facts['machine']['cores']} cores": facts})  # each machine beside the others


if __name__ == "__main__":
    main()
