"""Stock DDP and FSDP train through us the very weights that they train through gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from sides import begin_again, flat, gradsync_group
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs

Run = Callable[..., list[Any]]


class Branching(nn.Module):
    """With buffers, and a branch that is not always taken."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
        self.branch = nn.Linear(16, 16)
        self.taken = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        return self.branch(x) if self.taken else x


def built() -> Branching:
    torch.manual_seed(0)
    return Branching()


def trained(model: nn.Module, step: Callable[[int], None] = lambda _: None, batches: int = 4) -> Any:
    """What the model holds after some steps with other data on each rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(1 + dist.get_rank())
    for number in range(batches):
        step(number)
        model(torch.randn(8, 16, generator=data)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model.state_dict().values())


def whole(state: Any) -> Any:
    """The values to compare, also of what is sharded."""
    return flat([each.full_tensor() if isinstance(each, DTensor) else each for each in state])


def with_ddp(group: Any, hook: Any = None, unused: bool = False, uneven: bool = False, **options: Any) -> Any:
    model = built()
    ddp = DistributedDataParallel(model, process_group=group, **options)
    if hook is not None:
        ddp.register_comm_hook(group, hook)

    def step(number: int) -> None:
        model.taken = not unused or number % 2 == 0

    if uneven:
        with Join([ddp]):
            return trained(ddp, step, batches=3 + dist.get_rank())
    return trained(ddp, step)


KINDS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "many buckets": {"bucket_cap_mb": 1e-3},
    "static graph": {"static_graph": True},
    "bucket views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-3},
    "unused parameters": {"find_unused_parameters": True, "unused": True},
    "join": {"uneven": True},
    "fp16 hook": {"hook": default_hooks.fp16_compress_hook},
    "a hook with callbacks": {"hook": default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)},
}


def ddp_alike() -> None:
    ours = gradsync_group()
    for name, kind in KINDS.items():
        assert with_ddp(ours, **kind) == with_ddp(dist.group.WORLD, **kind), name


def test_ddp_trains_the_weights_it_trains_over_gloo_to_the_bit(run: Run) -> None:
    run(ddp_alike)


def linears() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))


def with_fsdp(group: Any, folder: Path) -> Any:
    first = FullyShardedDataParallel(linears(), process_group=group, device_id=torch.device("cpu"))
    weights = [trained(first, batches=2)]
    second = linears()
    fully_shard(second, mesh=DeviceMesh.from_group(group, "cpu"))
    weights.append(trained(second, batches=2))
    checkpoint.save(second.state_dict(), checkpoint_id=folder, process_group=group)
    third = linears()
    fully_shard(third, mesh=DeviceMesh.from_group(group, "cpu"))
    state = third.state_dict()
    checkpoint.load(state, checkpoint_id=folder, process_group=group)
    weights.append(whole(state.values()))
    return weights


def fsdp_alike(folder: Path) -> None:
    ours, theirs = with_fsdp(gradsync_group(), folder / "ours"), with_fsdp(dist.group.WORLD, folder / "theirs")
    assert ours == theirs
    assert ours[2] == ours[1]  # what was saved is what is loaded


# FSDP1 speaks of its successor, checkpoints of how they will be planned.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_fsdp_and_checkpoints_are_as_over_gloo(run: Run, tmp_path: Path) -> None:
    run(fsdp_alike, tmp_path)


def attached() -> Any:
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = gs.attach(model, optimizer)
    data = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(3):
        model(torch.randn(8, 16, generator=data)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sync.detach()
    tensor = gs.all_reduce(torch.ones(3), op="sum")
    return flat([*model.state_dict().values(), tensor])


def hooked(folder: Path) -> Any:
    model = built()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(*gs.ddp_hook(gs.Plan(), ddp))
    first = trained(ddp)
    second = DistributedDataParallel(built())
    watcher = gs.observe(second, trace=str(folder))
    found = trained(second)
    watcher.close()
    return first, found


def on_top(folder: Path) -> None:
    expected = attached(), hooked(folder / "gloo")
    begin_again(folder, "gradsync")
    assert dist.get_backend() == "gradsync"
    gs.init()  # adopts it
    assert (attached(), hooked(folder / "ours")) == expected
    begin_again(folder, "cpu:gradsync")
    gs.init(backend="cpu:gradsync")
    assert attached() == expected[0]


def test_attach_all_reduce_ddp_hook_and_observe_stand_on_our_group(run: Run, tmp_path: Path) -> None:
    run(on_top, tmp_path)


@pytest.mark.timeout(300)
def test_the_example_runs_as_it_stands() -> None:
    script = Path(__file__).parents[2] / "examples" / "backend_ddp.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [*launcher, script, "--steps", "2"], env=environment, text=True, capture_output=True, timeout=250
    )
    assert ran.returncode == 0, ran.stderr
    assert "cpu:gradsync" in ran.stdout
