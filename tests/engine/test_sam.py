"""Two backwards of one step, with what the first brought kept over the second: SAM, as docs/choosing.md writes it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs
from models import mlp
from yardstick import assert_replicas_equal

PAGE = Path(__file__).parents[2] / "docs" / "choosing.md"


def _sam_step() -> Callable[..., None]:
    found = re.search(r"^def sam_step.*?\n\n\n", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    names: dict[str, Any] = {"torch": torch}
    exec(found[0], names)
    step: Callable[..., None] = names["sam_step"]
    return step


def sam_like_ddp() -> None:
    models = []
    for kind in ("gradsync", "ddp"):
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sync = gs.attach(model, optimizer, gs.Plan(bucket_bytes=1024)) if kind == "gradsync" else None
        forward = model if sync is not None else DistributedDataParallel(model)
        for step in range(5):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * dist.get_rank() + step))
            _sam_step()(forward, optimizer, lambda model, x=x: model(x).square().mean(), rho=0.5)
        if sync is not None:
            sync.detach()
        models.append(model)
    assert_replicas_equal(models[0])
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_sam_step_of_the_docs_equals_ddp(run: Callable[..., Any]) -> None:
    run(sam_like_ddp)
