"""Ray's driver: `python ray_driver.py FOLDER`, one Ray for everything. What was seen is written to FOLDER/seen.json.

    first life    the laws of `laws`; the example to its end, with nobody killed; the example with worker 1 killed
    second life   the example, resumed

The example runs as it stands: its `main` is called, and what its workers run is wrapped.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import ray
import ray.train
import ray.train.torch
import ray_train
import torch
from torch import nn

import gradsync as gs
from gradsync.integrations import ray as gs_ray

_SUBREAPER = 36  # of prctl: orphans of our children become our children
_GONE_S = 30.0


def train_wrapped(config: dict[str, Any]) -> None:
    """In a worker."""
    folder, rank = Path(config["folder"]), ray.train.get_context().get_world_rank()
    if ray.train.get_checkpoint() is None:
        (folder / f"laws-{rank}.json").write_text(json.dumps(laws()))
        torch.save(undisturbed(config), folder / f"undisturbed-{rank}.pt")
    try:
        ray_train.train(config)
    except gs.PeerLost as error:
        (folder / f"lost-{rank}.txt").write_text(f"{error.ranks}: {error}")
        raise


def laws() -> dict[str, Any]:
    """What this worker found."""
    gs.init()
    ddp, losses = fit(lambda model, _: ray.train.torch.prepare_model(model))
    ours, same = fit(lambda model, optimizer: attached(model, optimizer, gs.Plan()))
    _, small = fit(lambda model, optimizer: attached(model, optimizer, gs.Plan(compress=gs.int4())))
    return {
        "equal": all(torch.equal(a, b) for a, b in zip(ddp, ours, strict=True)) and losses == same,
        "compressed": [sum(small[:5]), sum(small[-5:])],
        "twice": refusal(),
    }


def fit(prepare: Callable[[nn.Module, torch.optim.Optimizer], nn.Module]) -> tuple[list[torch.Tensor], list[float]]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.005, momentum=0.9)
    model = prepare(net, optimizer)
    losses = []
    data = torch.Generator().manual_seed(ray.train.get_context().get_world_rank())
    for _ in range(30):
        x = torch.randn(8, 16, generator=data)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [param.detach().clone() for param in net.parameters()], losses


def attached(model: nn.Module, optimizer: torch.optim.Optimizer, plan: gs.Plan) -> nn.Module:
    gs.attach(model, optimizer, plan)  # never detached: Ray must end such a worker too
    return model


def refusal() -> str:
    try:
        gs.attach(ray.train.torch.prepare_model(nn.Linear(2, 2)))
    except ValueError as error:
        return str(error)
    return "none"


def undisturbed(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The final weights of the example when nobody is killed, by the example's own loop."""
    reported: list[dict[str, Any]] = []

    def report(metrics: dict[str, Any], sync: gs.GradSync, state: dict[str, Any]) -> None:
        reported.append(state["model"])

    with mock.patch.object(gs_ray, "report", report):
        ray_train.train(config | {"die": None})
    return reported[-1]


def main(folder: Path) -> None:
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        _temp_dir=str(folder / "ray"),
        _plasma_directory=str(folder),
        _node_ip_address="127.0.0.1",
    )
    # What goes to the workers is pickled by value, being of this script; there `ray_train.train` is the example's own.
    with mock.patch.object(ray_train, "train", train_wrapped):
        result = ray_train.main(["--folder", str(folder), "--steps", "25", "--compress", "--die", "14"])
    ray.shutdown()
    left = children_after(_GONE_S)
    seen = {"metrics": result.metrics, "checkpoint": result.checkpoint.path, "left": left}
    (folder / "seen.json").write_text(json.dumps(seen))


def children_after(seconds: float) -> list[str]:
    """The commands of the processes that are still there, after they had that long to end."""
    deadline = time.monotonic() + seconds
    while (children := living_children()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return children


def living_children() -> list[str]:
    commands = []
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            if os.waitpid(int(pid), os.WNOHANG) == (0, 0):
                commands.append(f"{pid} {Path(f'/proc/{pid}/cmdline').read_text()[:200]}")
    return commands


if __name__ == "__main__":
    main(Path(sys.argv[1]))
