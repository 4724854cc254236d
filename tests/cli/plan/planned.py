"""What the tests of `gradsync plan` ask about, and how they hear its answer."""

from __future__ import annotations

import pytest
import torch

from gradsync.cli.main import main
from gradsync.cluster import Cluster, Link
from gradsync.planner.profile import Gradient, ModelProfile

Capture = pytest.CaptureFixture[str]

SMALL = ["--gpus", "16", "--network", "100g", "--params", "1e8", "--tokens", "1024"]


def tiny_profile(dtype: torch.dtype = torch.float32) -> ModelProfile:
    """20 matrices of 1 MB, 200 ms of backward."""
    gradients = tuple(Gradient(f"layers.{i}", (500, 500), dtype, 1e-2 * (i + 1)) for i in range(20))
    return ModelProfile(gradients, 0.1, 0.2, 0.01, tokens=1000)


def wired(bandwidth: float, hosts: int = 2) -> Cluster:
    """Hosts of one rank each with such a link between them, calibrated."""
    link = Link(20e-6, bandwidth)
    return Cluster(tuple((rank,) for rank in range(hosts)), link, link, calibrated=True)


def say(capsys: Capture, *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def refusal(capsys: Capture, *arguments: str) -> str:
    """The one sentence."""
    assert main(["plan", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("gradsync plan: ")
    assert told.err.count("\n") == 1
    return told.err
