"""What a rank does: the probe, a profile of each model, and then the steps that were to be predicted.

    ranks   │ probe │ model: a profiled step │ each arm: attach, warm up, a window of steps, detach │ again

The steps that are profiled, 5 at most, are spread over the time in which plans are measured: this machine computes by a
quarter faster or slower from one minute to the next, which is not what is to be predicted.

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

import gradsync as gs
from gradsync.autotune.profiling import profile
from gradsync.cli.local_ranks import advance
from gradsync.probe.measure import measure
from planner.arms import ARMS, Arm, plan_of
from planner.models import MODELS, Training

_FEW_ROUNDS = 2  # of the arms that are reported apart
_PROFILE_STEPS = 5


def play(link: str, rounds: int, folder: str) -> dict[str, Any]:
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
        training, profiles = make(rank), list[str]()
        samples: dict[str, list[float]] = {arm.name: [] for arm in ARMS}
        for number in range(rounds):
            if number < _PROFILE_STEPS:
                dist.barrier()
                profiles.append(_text(profile(training.model, training.step, training.optimizer, steps=1).save))
            for arm in ARMS[number % len(ARMS) :] + ARMS[: number % len(ARMS)]:
                if number < _FEW_ROUNDS or not arm.apart:
                    samples[arm.name].append(round(_turn(training, arm, link), 6))
            if rank == 0:
                advance(folder)
        found["models"][name] = {"profiles": profiles, "samples_s": samples}
    dist.barrier()
    return found


def _turn(training: Training, arm: Arm, link: str) -> float:
    """Attach, warm up, a window of steps, and off again: as in a run that has this plan only."""
    plan = plan_of(arm, link)
    sync = None if plan is None else gs.attach(training.model, training.optimizer, plan)
    for _ in range(arm.warm_up):
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
