"""Runs under `gs.auto()`: links made up, choices dictated, what rank 0 says overheard."""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import gradsync as gs
from gradsync.planner.prediction import Prediction
from models import mlp

BUCKETS = gs.Plan(bucket_bytes=1024)


def cluster(bandwidth: float = 1e9, ranks: int = 2) -> gs.Cluster:
    """So many hosts of one rank each."""
    link = gs.Link(latency_s=1e-5, bandwidth=bandwidth)
    return gs.Cluster(tuple((rank,) for rank in range(ranks)), link, link)


def predicted(plan: gs.Plan, step_s: float = 1.0) -> Prediction:
    quality = "exact" if plan.compress is None else "lossy"
    return Prediction(plan, step_s, step_s, step_s, step_s, 0.0, 0, 0, quality, "because we say so")


@contextmanager
def choosing(*plans: gs.Plan, step_s: float = 1.0) -> Iterator[list[gs.ModelProfile]]:
    """Rank 0 recommends these one after the other, the last one for ever; the profiles it was given."""
    profiles: list[gs.ModelProfile] = []

    def recommend(profile: gs.ModelProfile, cluster: gs.Cluster, allow: str) -> Sequence[Prediction]:
        profiles.append(profile)
        plan = plans[min(len(profiles), len(plans)) - 1]
        return [predicted(plan, step_s), predicted(gs.Plan(), 2 * step_s)]

    with patch("gradsync.autotune.decide.recommend", recommend):
        yield profiles


@contextmanager
def off(*verdicts: bool) -> Iterator[None]:
    """Whether the measured step is off, check by check; after these, never."""
    left = list(verdicts)
    with patch("gradsync.autotune.controller.is_off", lambda measured, expected: left.pop(0) if left else False):
        yield


@contextmanager
def overhearing() -> Iterator[io.StringIO]:
    with redirect_stderr(io.StringIO()) as said:
        yield said


class Training:
    """A small model; its data is a function of rank and step."""

    def __init__(self, plan: Any, build: Callable[[], torch.nn.Module] = mlp, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = build()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.sync = gs.attach(self.model, self.optimizer, plan, **options)
        self.plans: list[gs.Plan] = []  # with which each step synchronized

    def loss(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
        return self.model(torch.randn(6, 8, generator=generator)).square().mean()

    def apply(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: range, slow: Callable[[int], bool] = lambda step: False) -> list[str]:
        """The parameters after each step, as a digest: equal to the bit or not."""
        digests = []
        for step in steps:
            if slow(step):
                time.sleep(0.03)
            self.loss(step).backward()
            self.plans.append(self.sync.plan)
            self.apply()
            digests.append(self.digest())
        return digests

    def digest(self) -> str:
        flat = torch.cat([param.detach().flatten() for param in self.model.parameters()])
        return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:12]
