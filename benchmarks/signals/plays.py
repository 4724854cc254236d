"""Part 2, on the ranks: a small model is trained with a trace, and something goes wrong in one of them.

Faults are keyed by rank and step. What happens inside backward is reached by a listener to the
synchronization, in these processes only.
"""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs
from signals.models import stack

DEPTH, WIDTH, BATCH = 6, 128, 96
STEPS = 100  # every weight is compared within 64
_BUCKET_NBYTES = 128 << 10  # several buckets of a small model
_SLEEP_S = 0.02
_GUARD = gs.Guard(drift="warn", nonfinite="skip", timeout=10, dead_after=5)


def play(fault: str, truth: dict[str, Any], folder: str) -> None:
    """Train; `truth` says where the fault strikes. After an error this rank ends as a program that failed."""
    warnings.simplefilter("ignore")  # a guard warns of what it finds; here the trace is what counts
    torch.manual_seed(truth["seed"])
    if not dist.is_initialized():
        gs.init(timeout=60)
    model = stack(truth.get("depth", DEPTH), WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = gs.Plan(bucket_bytes=_BUCKET_NBYTES)
    sync = gs.attach(model, optimizer, plan, guard=_GUARD, trace=folder)
    struck = truth.get("rank") == dist.get_rank()
    with _pinned(truth):
        stage = Stage(fault if struck else "clean", truth, model, sync)
        for step, x in enumerate(sync.data(stage.batches())):
            stage.before_step(step)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            stage.after_step()
    sync.detach()


class Stage:
    """Where one rank's fault strikes."""

    def __init__(self, fault: str, truth: dict[str, Any], model: nn.Module, sync: gs.GradSync) -> None:
        self.step = 0
        self._fault, self._truth = fault, truth
        self._parameters = dict(model.named_parameters())
        self._rng = random.Random(truth["seed"])
        if fault == "nan":
            self._parameters[truth["parameter"]].register_hook(self._poison)
        self._synchronization = sync._synchronization
        if fault == "kill":
            self._die_after_launch()

    def batches(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * self._truth["seed"] + dist.get_rank())
        for _ in range(self._truth.get("steps", STEPS)):
            if self._fault == "input":
                time.sleep(_SLEEP_S)
            yield torch.randn(BATCH, WIDTH, generator=generator)

    def before_step(self, step: int) -> None:
        self.step = step
        if self._fault == "order" and step == self._truth["step"]:
            buckets, first = self._synchronization.bucket_order.buckets, self._truth["bucket"]
            buckets[first], buckets[first + 1] = buckets[first + 1], buckets[first]

    def after_step(self) -> None:
        if self._fault == "flip" and self.step == self._truth["step"]:
            words = self._parameters[self._truth["parameter"]].detach().view(torch.int32).flatten()
            words[self._rng.randrange(words.numel())] ^= _bit(self._truth["bit"])

    def _poison(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.step != self._truth["step"]:
            return gradient
        bad = gradient.clone()
        bad.view(-1)[self._rng.randrange(bad.numel())] = float("nan")
        return bad

    def _die_after_launch(self) -> None:
        def die(bucket: Any, pending: object) -> None:
            if (self.step, bucket.index) == (self._truth["step"], self._truth["bucket"]):
                os.kill(os.getpid(), signal.SIGKILL)

        self._synchronization.listeners.add(left=die)


class _pinned:
    """A core for each rank, where the truth asks for it; the old set afterwards, for the process is used again."""

    def __init__(self, truth: dict[str, Any]) -> None:
        self._cores: list[int] | None = truth.get("cores")
        self._before = os.sched_getaffinity(0)

    def __enter__(self) -> None:
        if self._cores is not None:
            os.sched_setaffinity(0, {self._cores[dist.get_rank()]})

    def __exit__(self, *_: object) -> None:
        os.sched_setaffinity(0, self._before)


def _bit(number: int) -> int:
    """One bit of 32, as a signed number."""
    return 1 << number if number < 31 else -(1 << 31)
