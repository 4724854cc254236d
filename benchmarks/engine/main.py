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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from workloads import CPU, GPU, SHARED_GPU, Workload  # noqa: E402

import bench_harness  # noqa: E402
import gradsync as gs  # noqa: E402
from gradsync.engine.attach import attach_engine  # noqa: E402

MODES = ("eager", "blocks compiled", "whole compiled")
WHOLE = "few large"  # compiling 250 blocks as one graph takes longer than the benchmark
Choice = tuple[int, bool, bool]  # DDP's bucket_cap_mb, gradient_as_bucket_view and static_graph


class Setting(NamedTuple):
    """Where ranks run and what they train."""

    device: str
    ranks: int
    workloads: dict[str, Workload]
    steps: int  # per turn: on a GPU the host runs ahead


SETTINGS = {
    "cpu": {"two ranks, gloo": Setting("cpu", 2, CPU, 1)},
    "cuda": {
        "hook overhead, one rank, nccl": Setting("cuda", 1, GPU, 5),
        "two ranks, gloo": Setting("cuda", 2, SHARED_GPU, 2),
    },
}


class Variant:
    """One way to train one replica."""

    def __init__(self, setting: Setting, name: str, mode: str, wrap: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        self.device, self.steps = setting.device, setting.steps
        workload = setting.workloads[name]
        model = workload.build().to(self.device)
        if mode == "blocks compiled":
            for block in model:
                block.compile()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.forward = wrap(model, self.optimizer)
        if mode == "whole compiled":
            self.forward = torch.compile(self.forward)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.x = torch.randn(workload.batch, generator=generator).to(self.device)

    def turn(self) -> float:
        """Seconds per step of one turn; every rank starts it together."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(self.steps):
            self.forward(self.x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / self.steps


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    return model


def _gradsync(attached: list[gs.GradSync]) -> Callable[..., Any]:
    def wrap(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        # Hooks also where one rank alone would need none: that is what is measured.
        attached.append(attach_engine(model, optimizer, None, None, "broadcast", (), None, always=True))
        return model

    return wrap


def _ddp(bucket_mb: int, view: bool, static: bool) -> Callable[..., Any]:
    def wrap(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        return DistributedDataParallel(
            model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=view, static_graph=static
        )

    return wrap


def best_ddp(setting: Setting, name: str, rounds: int) -> tuple[Choice, dict[str, float]]:
    """DDP's best of bucket size, bucket view and static graph, measured eagerly; agreed over ranks."""
    choices = list(itertools.product((1, 5, 25), (False, True), (False, True)))
    arms = {str(c): Variant(setting, name, "eager", _ddp(*c)).turn for c in choices}
    samples = bench_harness.interleave(arms, rounds + 1)
    medians = torch.tensor([median(samples[str(c)][1:]) for c in choices])
    dist.broadcast(medians, 0)
    return choices[int(medians.argmin())], {str(c): round(float(m), 6) for c, m in zip(choices, medians, strict=True)}


def measure(device: str, where: str, name: str, mode: str, rounds: int, tuned: dict[str, Any] | None) -> dict[str, Any]:
    """One cell: a model in one mode, all arms. `tuned` is what the first mode's cell found out about DDP."""
    setting = SETTINGS[device][where]
    if device == "cuda":
        torch.cuda.set_device(0)
    torch.compiler.reset()
    if tuned is None:
        choice, tuning = best_ddp(setting, name, 4)
        tuned = {
            "ddp_setting": dict(zip(("bucket_cap_mb", "gradient_as_bucket_view", "static_graph"), choice, strict=True)),
            "ddp_tuning": tuning,
        }
    attached: list[gs.GradSync] = []
    arms = {
        "plain": Variant(setting, name, mode, _plain),
        "ddp": Variant(setting, name, mode, _ddp(*tuned["ddp_setting"].values())),
        "gradsync": Variant(setting, name, mode, _gradsync(attached)),
    }
    for arm in arms.values():
        for _ in range(3):
            arm.turn()
    samples = bench_harness.interleave({name: arm.turn for name, arm in arms.items()}, rounds)
    return {
        **tuned,
        "steps_per_turn": setting.steps,
        "overlap": overlap(attached[0]),
        "samples": bench_harness.rounded(samples),
    }


def joined(launches: list[dict[str, Any]]) -> dict[str, Any]:
    """The launches of one cell as one: where memory lies differs from process to process, by more than the rounds."""
    names = launches[0]["samples"]
    samples = {name: [x for launch in launches for x in launch["samples"][name]] for name in names}
    ratio, low, high = bench_harness.paired_ratio(samples, "gradsync", "ddp")
    return launches[-1] | {
        "launches": len(launches),
        "ratio": round(ratio, 4),
        "ratio_quartiles": [round(low, 4), round(high, 4)],
        "samples": samples,
    }


def overlap(sync: gs.GradSync) -> dict[str, float]:
    """How much of the time on the wire backward hid, by gradsync's own count; nothing where only a GPU knows."""
    stats = sync.stats()
    comm, exposed = float(stats["comm_s"] or 0), float(stats["exposed_s"] or 0)
    if not comm:
        return {}
    return {
        "comm_ms": round(1e3 * comm, 3),
        "exposed_ms": round(1e3 * exposed, 3),
        "hidden": 1 - min(1, exposed / comm),
    }


def one_rank_on_nccl(*args: Any) -> dict[str, Any]:
    """The hooks alone, on a GPU."""
    if not dist.is_initialized():
        gs.init()
    return measure(*args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(SETTINGS), default="cpu")
    parser.add_argument("--ranks", type=int, nargs="+", help="only the settings with so many ranks")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--rounds", type=int, default=15, help="per launch")
    parser.add_argument("--launches", type=int, default=4, help="fresh processes per cell")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    parser.add_argument("--commit", default=bench_harness.commit(HERE), help="what is measured, outside of a clone")
    arguments = parser.parse_args()
    device = arguments.device
    facts: dict[str, Any] = {"machine": bench_harness.machine(), "cells": {}}
    tuned: dict[tuple[str, str], dict[str, Any]] = {}
    for where, name, mode in itertools.product(SETTINGS[device], CPU, arguments.modes):
        ranks = SETTINGS[device][where].ranks
        if (mode == "whole compiled" and name != WHOLE) or (arguments.ranks and ranks not in arguments.ranks):
            continue
        start = time.perf_counter()
        launches = []
        for _ in range(arguments.launches):
            args = (device, where, name, mode, arguments.rounds, tuned.get((where, name)))
            one = one_rank_on_nccl(*args) if ranks == 1 else gs.spawn(measure, ranks, *args, timeout=900)[0]
            tuned[where, name] = {key: one[key] for key in ("ddp_setting", "ddp_tuning")}
            launches.append(one)
        cell = joined(launches)
        facts["cells"][f"{where} | {name} | {mode}"] = {"commit": arguments.commit, **cell}
        bench_harness.save(arguments.out, {device: facts})  # after every cell: a long run may be cut short
        print(
            f"{where} | {name} | {mode}: gradsync / DDP = {cell['ratio']:.3f} {cell['ratio_quartiles']}"
            f" ({time.perf_counter() - start:.0f} s)",
            flush=True,
        )
    print("\n" + as_table(facts["cells"]))


def as_table(cells: dict[str, Any]) -> str:
    """For the README: milliseconds per step, and the paired ratio."""
    rows = []
    for key, cell in cells.items():
        times = [bench_harness.milliseconds(cell["samples"][arm]) for arm in ("plain", "ddp", "gradsync")]
        low, high = cell["ratio_quartiles"]
        hidden = f"{cell['overlap']['hidden']:.0%}" if cell.get("overlap") else "–"
        rows.append([*key.split(" | "), *times, hidden, f"**{cell['ratio']:.3f}** ({low:.3f}–{high:.3f})"])
    header = ["setting", "parameters", "mode", "plain ms", "DDP ms", "gradsync ms", "hidden", "gradsync / DDP"]
    return bench_harness.table(header, rows)


if __name__ == "__main__":
    main()
