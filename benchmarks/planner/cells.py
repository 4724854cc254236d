"""What a rank does: the probe, a profile of each model, and then the steps that were to be predicted.

    ranks   │ probe │ model: 5 steps of profile │ arms in turn, windows of steps without a barrier inside │ next model

A sample is the mean step of a window, on the rank that took longest.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import bench_harness
import gradsync as gs
from gradsync.cli.progress import advance
from gradsync.engine.profiling import profile
from gradsync.probe.measuring import measure
from planner.arms import ARMS, Arm, plan_of
from planner.models import MODELS

_WARM_UP = 1  # windows
_PROFILE_STEPS = 5


def play(link: str, arms: list[str], rounds: int, progress: str) -> dict[str, Any]:
    """This rank's measurements; every rank of the link calls it."""
    torch.set_num_threads(1)
    gs.init(timeout=300)
    rank = dist.get_rank()
    begun = time.perf_counter()
    findings = measure(dist.distributed_c10d._get_default_group())
    found: dict[str, Any] = {
        "probe_s": round(time.perf_counter() - begun, 1),
        "cluster": _text(findings.cluster.save),
        "warnings": list(findings.warnings),
        "models": {},
    }
    for name, make in MODELS.items():
        training = make(rank)
        dist.barrier()
        measured = profile(training.model, training.step, training.optimizer, steps=_PROFILE_STEPS)
        samples = _samples(make, [arm for arm in ARMS if arm.name in arms], link, rounds, progress, rank)
        found["models"][name] = {"profile": _text(measured.save), "samples_s": samples}
    dist.barrier()
    return found


def _samples(make: Callable[[int], Any], arms: list[Arm], link: str, rounds: int, progress: str, rank: int) -> Any:
    trainings = {arm.name: make(rank) for arm in arms}
    syncs = [
        gs.attach(t.model, t.optimizer, plan_of(arm, link)) for arm, t in zip(arms, trainings.values(), strict=True)
    ]

    def turn(arm: Arm) -> Callable[[], float]:
        def run() -> float:
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(arm.window):
                trainings[arm.name].step()
            return (time.perf_counter() - begun) / arm.window

        return run

    def tick() -> None:
        if rank == 0:
            advance(progress)

    samples = bench_harness.interleave({arm.name: turn(arm) for arm in arms}, _WARM_UP + rounds, tick)
    for sync in syncs:
        sync.detach()
    return {name: values[_WARM_UP:] for name, values in bench_harness.rounded(samples).items()}


def _text(save: Callable[[Path], None]) -> str:
    """What it writes into a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "written.toml"
        save(path)
        return path.read_text()
