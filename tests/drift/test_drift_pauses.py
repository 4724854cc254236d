"""Where replicas differ by design nobody compares them: inside join(), and with paces that let them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs

PACES = {
    "local_sgd": gs.local_sgd(100),
    "diloco": gs.diloco(100),
    "gossip": gs.gossip(),
    "async_sgd": gs.async_sgd(2),
}


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    model(torch.randn(2, 4)).square().sum().backward()
    opt.step()
    opt.zero_grad()


def differ_and_broadcast() -> tuple[int, list[str]]:
    """The model is large enough that each step digests something of it."""
    torch.manual_seed(0)
    model = nn.Linear(32, 32)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sync = gs.attach(model, opt, guard=gs.Guard(drift="warn"))
    torch.manual_seed(dist.get_rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(20):
            if number == 2 and dist.get_rank():
                opt.param_groups[0]["lr"] = 0.5
            if number == 10:
                sync.broadcast()
            model(torch.randn(2, 32)).square().sum().backward()
            opt.step()
            opt.zero_grad()
    health_log = sync.stats()["drift_findings"]
    sync.detach()
    return health_log, [str(warning.message) for warning in caught]


def test_after_a_broadcast_nothing_of_before_is_told(run: Any) -> None:
    for health_log, told in run(differ_and_broadcast):
        assert health_log == len(told)
        assert told
        assert not any("it has passed" in text for text in told)


def join_unevenly() -> tuple[int, int, list[str]]:
    """Findings inside join(), where rank 0 has 90 batches and rank 1 has 5; and after it."""
    model, opt = model_and_optimizer()
    sync = gs.attach(model, opt, guard=gs.Guard(drift="raise"))
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        step(model, opt)
    with sync.join():
        for _ in range(5 if dist.get_rank() else 90):
            step(model, opt)
    inside = sync.stats()["drift_findings"]
    for _ in range(65):
        step(model, opt)
    clean = sync.stats()["drift_findings"]
    if dist.get_rank():
        model.weight.data[1, 2] += 1
    said = []
    try:
        for _ in range(65):
            step(model, opt)
    except gs.Disagreement as error:
        said.append(str(error))
    sync.detach()
    return inside, clean, said


def test_join_pauses_the_watch_and_it_goes_on_afterwards(run: Any) -> None:
    for inside, clean, said in run(join_unevenly):
        assert (inside, clean) == (0, 0)
        assert said[0].startswith('the replicas differ: element [1, 2] of parameter "weight" is ')


def train_apart(pace: str) -> int:
    model, opt = model_and_optimizer()
    sync = gs.attach(model, opt, gs.Plan(pace=PACES[pace]), guard=gs.Guard(drift="raise"))
    torch.manual_seed(dist.get_rank())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(70):
            step(model, opt)
        while sync.drain():
            opt.step()
    health_log = sync.stats()["drift_findings"]
    sync.detach()
    return health_log


@pytest.mark.parametrize("pace", PACES)
def test_paces_whose_replicas_differ_by_design_are_not_watched(pace: str, run: Any) -> None:
    assert run(train_apart, pace) == [0, 0]
