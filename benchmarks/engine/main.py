"""What does gradsync's engine cost beside DDP's? Plain training, DDP at its best and gradsync, taking turns.

python benchmarks/engine/main.py                 # CPU, two ranks
python benchmarks/engine/main.py --device cuda   # one rank on NCCL with hooks forced on; two on gloo
"""

from __future__ import annotations

import argparse
import itertools
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
sys.path[:0] = [str(HERE.parent), str(HERE)]

from workloads import CPU, GPU, Workload  # noqa: E402

import bench_harness  # noqa: E402
import gradsync as gs  # noqa: E402
from gradsync.engine.attachment import attach_engine  # noqa: E402

MODES = ("eager", "blocks compiled", "whole compiled")
TURN = {"cpu": 1, "cuda": 10}  # steps per turn: on a GPU the host runs ahead
WHOLE = "few large"  # compiling 250 blocks as one graph takes longer than the benchmark


class Arm:
    """One way to train one replica."""

    def __init__(self, workload: Workload, device: str, mode: str, wrap: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        self.device = device
        model = workload.build().to(device)
        if mode == "blocks compiled":
            for block in model:
                block.compile()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.forward = wrap(model, self.optimizer)
        if mode == "whole compiled":
            self.forward = torch.compile(self.forward)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.x = torch.randn(workload.batch, generator=generator).to(device)

    def turn(self) -> float:
        """Seconds per step of one turn; every rank starts it together."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(TURN[self.device]):
            self.forward(self.x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / TURN[self.device]


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    return model


def _gradsync(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    # Hooks also where one rank alone would need none: that is what is measured.
    attach_engine(model, optimizer, None, None, "broadcast", (), None, always=True)
    return model


def _ddp(bucket_mb: int, view: bool, static: bool) -> Callable[..., Any]:
    def wrap(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        return DistributedDataParallel(
            model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=view, static_graph=static
        )

    return wrap


def best_ddp(workload: Workload, device: str, rounds: int) -> tuple[tuple[int, bool, bool], dict[str, float]]:
    """DDP's best of bucket size, bucket view and static graph, measured eagerly; agreed over ranks."""
    choices = list(itertools.product((1, 5, 25), (False, True), (False, True)))
    arms = {str(c): Arm(workload, device, "eager", _ddp(*c)).turn for c in choices}
    samples = bench_harness.interleave(arms, rounds)
    medians = torch.tensor([median(samples[str(c)][1:]) for c in choices])
    dist.broadcast(medians, 0)
    return choices[int(medians.argmin())], {str(c): round(float(m), 6) for c, m in zip(choices, medians, strict=True)}


def measure(device: str, name: str, mode: str, rounds: int) -> dict[str, Any]:
    """One cell: a model in one mode, all arms."""
    workload = (CPU if device == "cpu" else GPU)[name]
    if device == "cuda":
        torch.cuda.set_device(0)
    choice, tuning = best_ddp(workload, device, 5)
    arms = {
        "plain": Arm(workload, device, mode, _plain),
        "ddp": Arm(workload, device, mode, _ddp(*choice)),
        "gradsync": Arm(workload, device, mode, _gradsync),
    }
    for arm in arms.values():
        for _ in range(3):
            arm.turn()
    samples = bench_harness.interleave({name: arm.turn for name, arm in arms.items()}, rounds)
    ratio, low, high = bench_harness.paired_ratio(samples, "gradsync", "ddp")
    return {
        "ddp_setting": {"bucket_cap_mb": choice[0], "gradient_as_bucket_view": choice[1], "static_graph": choice[2]},
        "ddp_tuning": tuning,
        "ratio": round(ratio, 4),
        "ratio_quartiles": [round(low, 4), round(high, 4)],
        "samples": bench_harness.rounded(samples),
    }


def one_rank_on_nccl(name: str, mode: str, rounds: int) -> dict[str, Any]:
    """The hooks alone, on a GPU."""
    if not dist.is_initialized():
        gs.init()
    return measure("cuda", name, mode, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    arguments = parser.parse_args()
    settings = (
        ["two ranks, gloo"] if arguments.device == "cpu" else ["hook overhead, one rank, nccl", "two ranks, gloo"]
    )
    cells: dict[str, Any] = {}
    for setting, name, mode in itertools.product(settings, CPU, arguments.modes):
        if mode == "whole compiled" and name != WHOLE:
            continue
        if setting.startswith("hook"):
            cell = one_rank_on_nccl(name, mode, arguments.rounds)
        else:
            cell = gs.spawn(measure, 2, arguments.device, name, mode, arguments.rounds, timeout=900)[0]
        cells[f"{setting} | {name} | {mode}"] = cell
        print(
            f"{setting} | {name} | {mode}: gradsync / DDP = {cell['ratio']:.3f} {cell['ratio_quartiles']}", flush=True
        )
    facts = {"machine": bench_harness.machine(), "commit": bench_harness.commit(HERE), "cells": cells}
    bench_harness.save(arguments.out, {arguments.device: facts})
    print("\n" + as_table(cells))


def as_table(cells: dict[str, Any]) -> str:
    """For the README: milliseconds per step, and the paired ratio."""
    rows = []
    for key, cell in cells.items():
        times = [bench_harness.milliseconds(cell["samples"][arm]) for arm in ("plain", "ddp", "gradsync")]
        low, high = cell["ratio_quartiles"]
        rows.append([*key.split(" | "), *times, f"**{cell['ratio']:.3f}** ({low:.3f}–{high:.3f})"])
    return bench_harness.table(
        ["setting", "parameters", "mode", "plain ms", "DDP ms", "gradsync ms", "gradsync / DDP"], rows
    )


if __name__ == "__main__":
    main()
