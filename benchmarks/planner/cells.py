"""What a rank does: the probe, a profile of each model, and then the steps that were to be predicted.

    ranks   │ probe │ model: 5 steps of profile │ arms in turn: attach, warm up, a window of steps, detach │ next model

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
from planner.models import MODELS, Training

_WARM_UP = 8  # steps: a period of the slowest pace, and more than the engine needs to learn the order
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
        samples = _samples(training, [arm for arm in ARMS if arm.name in arms], link, rounds, progress)
        found["models"][name] = {"profile": _text(measured.save), "samples_s": samples}
    dist.barrier()
    return found


def _samples(training: Training, arms: list[Arm], link: str, rounds: int, progress: str) -> dict[str, list[float]]:
    def turn(arm: Arm) -> Callable[[], float]:
        return lambda: _turn(training, arm, link)

    def tick() -> None:
        if dist.get_rank() == 0:
            advance(progress)

    samples = bench_harness.interleave({arm.name: turn(arm) for arm in arms}, rounds, tick)
    return bench_harness.rounded(samples)


def _turn(training: Training, arm: Arm, link: str) -> float:
    """Attach, warm up, a window of steps, and off again: as in a run that has this plan only."""
    plan = plan_of(arm, link)
    sync = None if plan is None else gs.attach(training.model, training.optimizer, plan)
    for _ in range(_WARM_UP):
        training.step()
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(arm.window):
        training.step()
    seconds = (time.perf_counter() - begun) / arm.window
    if sync is not None:
        sync.detach()
    dist.barrier()
    return seconds


def _text(save: Callable[[Path], None]) -> str:
    """What it writes into a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "written.toml"
        save(path)
        return path.read_text()
