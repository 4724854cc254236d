"""GRADSYNC_DISABLE=1 trains as plain averaging does, whatever the plan says."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs


def trained(plan: Any) -> tuple[gs.Plan, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sync = gs.attach(model, optimizer, plan)
    for step in range(5):
        model(torch.full((2, 8), 1.0 + step + dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    used = sync.plan
    sync.detach()
    return used, [param.detach().clone() for param in model.parameters()]


def check() -> None:
    _, exact = trained(gs.Plan())
    for plan in (gs.Plan(compress=gs.sign()), gs.Plan(pace=gs.local_sgd(2)), gs.auto(), gs.Plan(algorithm=gs.ring())):
        said = StringIO()
        with patch.dict(os.environ, {"GRADSYNC_DISABLE": "1"}), redirect_stderr(said):
            used, ours = trained(plan)
        assert (used.algorithm, used.compress, used.pace) == (gs.native(), None, gs.every_step())
        assert all(torch.equal(one, two) for one, two in zip(ours, exact, strict=True))
        assert ("GRADSYNC_DISABLE is set" in said.getvalue()) == (dist.get_rank() == 0)
    with patch.dict(os.environ, {"GRADSYNC_DISABLE": "0"}):
        assert trained(gs.Plan(compress=gs.bf16()))[0].compress is not None


def test_the_variable_makes_every_plan_plain(run: Callable[..., Any]) -> None:
    run(check)
