"""Runs whose weights follow to the bit from a state, on every machine: no product of a gradient is rounded.

    PYTHONPATH=<a clone of an older commit>/src:tests/checkpoint python tests/checkpoint/saved_runs.py FOLDER [PLAN...]

writes there what that commit saves, and the weights that it reaches when it trains on: a file per plan and rank.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import gradsync as gs

AsyncSGD = type(gs.async_sgd(0))
SLOW = gs.Link(latency_s=1e-3, bandwidth=1e4)
PARTS = [gs.rule(dims=1, compress=gs.sign()), gs.rule("wide", compress=gs.powersgd(2))]

# The plan, the ranks that save and those that load, and the steps before; steps 6 and 7 of auto() have its own plan.
RUNS = {
    "exact": (gs.Plan(), 2, 2, 5),
    "accumulate": (gs.Plan(pace=gs.accumulate(4)), 2, 2, 6),
    "int8": (gs.Plan(compress=gs.int8()), 2, 2, 5),
    "int8-of-4-ranks": (gs.Plan(compress=gs.int8()), 4, 2, 5),
    "topk": (gs.Plan(compress=gs.topk(0.1)), 2, 2, 5),
    "powersgd": (gs.Plan(compress=gs.powersgd(2)), 2, 2, 5),
    "by_parameter": (gs.Plan(compress=gs.by_parameter(PARTS)), 2, 2, 5),
    "local_sgd": (gs.Plan(pace=gs.local_sgd(4, optimizer_state=True)), 2, 2, 6),
    "diloco": (gs.Plan(pace=gs.diloco(4, gs.nesterov(0.5, 0.5), fragments=2, delay=1)), 2, 2, 6),
    "diloco-int8": (gs.Plan(compress=gs.int8(), pace=gs.diloco(4)), 2, 2, 6),
    "delayed": (gs.Plan(pace=gs.delayed(2)), 2, 2, 5),
    "delayed-int8": (gs.Plan(compress=gs.int8(), pace=gs.delayed()), 2, 2, 5),
    "gossip": (gs.Plan(pace=gs.gossip()), 2, 2, 5),
    "async_sgd": (gs.Plan(pace=gs.async_sgd(0)), 2, 2, 5),
    "auto": (gs.auto("lossy", gs.Cluster(((0,), (1,)), SLOW, SLOW)), 2, 2, 8),
}
MORE = 6  # steps after the state was saved


class Rows(nn.Module):
    """Each parameter is drawn to the data, so its gradient is their difference."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.arange(-48.0, 48.0).view(12, 8) / 64)
        self.tall = nn.Parameter(torch.linspace(-1, 1, 33))
        self.last = nn.Parameter(torch.ones(3, 5))

    def forward(self, step: int, rank: int) -> torch.Tensor:
        total = torch.zeros(())
        for param in self.parameters():
            places = torch.arange(float(param.numel())).view(param.shape)
            far = param - ((places * (7 + rank) + 3 * step) % 32 - 15) / 16
            total = total + (far * far).sum() / 2
        return total


class SavedRun:
    """A model in training whose whole state fits in a flat file."""

    def __init__(self, name: str) -> None:
        self.plan, _, _, self.before = RUNS[name]
        self.model = Rows()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.25, momentum=0.5)
        self.sync = gs.attach(self.model, self.optimizer, self.plan)

    def train(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            self.model(step, dist.get_rank()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        if isinstance(self.sync.plan.pace, AsyncSGD):  # its ranks are to be at one clock
            self.sync.drain()

    def state(self) -> dict[str, torch.Tensor]:
        optimizer = {
            f"optimizer.{number}.{key}": tensor
            for number, kept in self.optimizer.state_dict()["state"].items()
            for key, tensor in kept.items()
            if tensor is not None
        }
        model = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        return {key: tensor.clone() for key, tensor in {**model, **optimizer, **self.sync.state_dict()}.items()}

    def load(self, *states: dict[str, torch.Tensor]) -> None:
        """This rank's own state first; the others are of ranks that are gone."""
        own = states[0]
        self.model.load_state_dict({key[6:]: tensor for key, tensor in own.items() if key.startswith("model.")})
        optimizer = self.optimizer.state_dict()
        for key, tensor in own.items():
            if key.startswith("optimizer."):
                _, number, name = key.split(".")
                optimizer["state"].setdefault(int(number), {})[name] = tensor.clone()
        self.optimizer.load_state_dict(optimizer)
        united = {key: tensor for state in reversed(states) for key, tensor in state.items()}
        self.sync.load_state_dict({key: each for key, each in united.items() if key.startswith("gradsync.")})

    def weights(self) -> dict[str, torch.Tensor]:
        return {f"after.{name}": tensor.clone() for name, tensor in self.model.state_dict().items()}


def save(name: str, folder: str) -> None:
    """One rank's state, and after all have written theirs."""
    run = SavedRun(name)
    run.train(0, run.before)
    save_file(run.state(), Path(folder) / f"{name}-rank{dist.get_rank()}.safetensors")
    run.sync.detach()


def resumed(name: str, folder: str) -> dict[str, torch.Tensor]:
    """What this rank's weights are after training on from the files."""
    _, saved, size, before = RUNS[name]
    files = [Path(folder) / f"{name}-rank{old}.safetensors" for old in range(dist.get_rank(), saved, size)]
    run = SavedRun(name)
    run.load(*(load_file(file) for file in files))
    run.train(before, before + MORE)
    weights = run.weights()
    run.sync.detach()
    return weights


def save_after(name: str, folder: str) -> None:
    weights = resumed(name, folder)
    dist.barrier()  # until then others read the files
    file = Path(folder) / f"{name}-rank{dist.get_rank()}.safetensors"
    save_file(load_file(file) | weights, file)


if __name__ == "__main__":
    import saved_runs  # by the name that ranks know

    for name in sys.argv[2:] or RUNS:
        _, saved, size, _ = RUNS[name]
        gs.spawn(saved_runs.save, saved, name, sys.argv[1])
        gs.spawn(saved_runs.save_after, size, name, sys.argv[1])
