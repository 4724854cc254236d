"""A child that is forked from a rank has its shared memory: it must not take part in what the rank trains."""

from __future__ import annotations

import copy
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def in_a_child(work: Callable[[], str]) -> str:
    """What it says there."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.write(writing, work().encode())
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.close(writing)
    with open(reading) as said:
        text = said.read()
    os.waitpid(pid, 0)
    return text


def fork_and_train() -> list[str]:
    torch.manual_seed(dist.get_rank())
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer, guard=gs.Guard(timeout=20))
    step(model, optimizer)

    def refused() -> str:
        model(torch.randn(4, 8))  # a forward is nobody's affair
        try:
            step(model, optimizer)
        except gs.GradSyncError as error:
            return str(error).replace(str(os.getpid()), "child").replace(str(os.getppid()), "parent")
        return "trained"

    def copied() -> str:
        mine = copy.deepcopy(model)
        step(mine, torch.optim.SGD(mine.parameters(), lr=0.1))
        return "trained a copy"

    said = [in_a_child(refused), in_a_child(copied)]
    step(model, optimizer)
    sync.detach()
    return said


def test_a_forked_child_is_told_at_once_and_does_no_harm(run: Callable[..., Any]) -> None:
    for said in run(fork_and_train, ranks=2):
        assert said == [
            "this process (pid child) was forked from the rank (pid parent) that attached the model, and cannot take "
            "part in its steps; train a copy there, copy.deepcopy(model), or start it by spawn",
            "trained a copy",
        ]
