"""What ranks of several hosts train with compression."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs
from gradsync.compress.recipe import Compressor
from gradsync.compress.toml import from_canonical
from netlab.traffic import payload, sent

_COUNTED_STEPS = 3


def conserve(recipes: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """For each compressor: the weights at the end, all gradients of this rank, all averages, what is left over."""
    gs.init(timeout=60)
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(20, 120), nn.Tanh(), nn.Linear(120, 120), nn.Tanh(), nn.Linear(120, 3))
    found = []
    for compressor in map(from_canonical, recipes):
        model = nn.Sequential(nn.Linear(20, 120), nn.Tanh(), nn.Linear(120, 120), nn.Tanh(), nn.Linear(120, 3))
        model.load_state_dict(first.state_dict())
        found.append(_conserve(model, compressor, steps))
    dist.destroy_process_group()
    return found


def count(recipes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each compressor: what this host sent in a step by the kernel's count, and what it sends by `stats`."""
    gs.init(timeout=60)
    found = [_count(compressor) for compressor in map(from_canonical, recipes)]
    dist.destroy_process_group()
    return found


def _count(compressor: Compressor) -> dict[str, Any]:
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(800, 800, bias=False)
    sync = gs.attach(model, plan=gs.Plan(compress=compressor))
    for _ in range(2):  # the first is exact, the second makes connections
        model(torch.randn(4, 800)).square().sum().backward()
    # The least of some: TCP may send twice, a compressor would always.
    counted = min(_count_step(model) for _ in range(_COUNTED_STEPS))
    stats = sync.stats()
    sync.detach()
    own = {key.partition(".")[2]: value for key, value in stats.items() if "." in key}
    return {"counted": counted, "claimed": stats["sent_nbytes"], "of_compressor": own["sent_nbytes"], "way": own["way"]}


def _count_step(model: nn.Module) -> int:
    dist.barrier()
    before = sent(Path("/proc/net/dev").read_text())
    model(torch.randn(4, 800)).square().sum().backward()
    dist.barrier()  # all that this host has to send is sent
    after = sent(Path("/proc/net/dev").read_text())
    return payload(after.nbytes - before.nbytes, after.packets - before.packets)


def _conserve(model: nn.Module, compressor: Compressor, steps: int) -> dict[str, Any]:
    twin = nn.Sequential(nn.Linear(20, 120), nn.Tanh(), nn.Linear(120, 120), nn.Tanh(), nn.Linear(120, 3))
    sync = gs.attach(model, plan=gs.Plan(compress=compressor, bucket_bytes=20_000))
    generator = torch.Generator().manual_seed(dist.get_rank())
    given, taken = torch.zeros(2, _numel(model), dtype=torch.float64)
    for _ in range(steps):
        x = torch.randn(8, 20, generator=generator)
        twin.load_state_dict(model.state_dict())
        for net, total in ((twin, given), (model, taken)):
            net.zero_grad()
            net(x).square().sum().backward()
            total += _flat([param.grad for param in net.parameters()])
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.01 * param.grad
    left = {name: tensor.double() for name, tensor in sync.residuals().items()}
    stats = sync.stats()
    sync.detach()
    names = [name for name, _ in model.named_parameters()]
    zeros = {name: torch.zeros_like(param) for name, param in model.named_parameters()}
    return {
        "weights": _flat([param.detach() for param in model.parameters()]).tolist(),
        "given": given.tolist(),
        "taken": taken.tolist(),
        "left": _flat([left.get(name, zeros[name]) for name in names]).tolist(),
        "sent_nbytes": stats["sent_nbytes"],
        "way": stats["algorithm"],
    }


def _numel(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def _flat(tensors: list[Any]) -> torch.Tensor:
    return torch.cat([tensor.flatten().double() for tensor in tensors])
