"""What ranks of a lab train and reduce."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs
from gradsync.transport.host_meeting import host_identity


def reduce_ones(numel: int) -> float:
    """One all-reduce of gloo's own."""
    gs.init(timeout=30)
    tensor = torch.ones(numel)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return float(tensor.sum())


ALGORITHMS = {
    "ring": gs.ring(),
    "tree": gs.tree(),
    "halving_doubling": gs.halving_doubling(),
    "hierarchical": gs.hierarchical(),
}


def train(steps: int, algorithm: str | None = None) -> tuple[str, list[float], float]:
    """The host as gradsync sees it, the weights after some steps, and how far they are from the first ones."""
    gs.init(timeout=30)
    rank = dist.get_rank()
    torch.manual_seed(rank)  # replicas start apart: attach brings them together
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = gs.Plan(algorithm=None if algorithm is None else ALGORITHMS[algorithm])
    sync = gs.attach(model, optimizer, plan)
    first = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
    last = nn.utils.parameters_to_vector(model.parameters()).detach()
    sync.detach()
    dist.destroy_process_group()
    return host_identity(), last.tolist(), float((last - first).norm())
