"""A call, or several, of every public name: what a rank runs for `test_global_state`."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs
from global_state import thawed, unchanged, unusual
from gradsync.integrations.batch_norm import convert, revert
from gradsync.probe.measure import measure

LINK = gs.Link(latency_s=1e-5, bandwidth=1e9)


class Scene:
    """What a user has before calling anything; building a model draws from the random state, so it is built first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)).float()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.ddp = DistributedDataParallel(self.model)
        self.batches = [torch.randn(6, 8, dtype=torch.float32) for _ in range(5)]
        self.tensor = torch.randn(1000, dtype=torch.float32)

    def train(self, forward: nn.Module) -> None:
        for x in self.batches:
            forward(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def step(self) -> None:
        self.train(self.model)

    def profile(self) -> gs.ModelProfile:
        return gs.profile(self.model, self.step, self.optimizer, steps=1)


Case = Callable[[Scene], object]


def plan(**fields: Any) -> Case:
    """Train with such a plan, from attach to detach, with every question that one may ask meanwhile."""
    return partial(train, plan=gs.Plan(bucket_bytes=1024, **fields))


def train(scene: Scene, plan: Any = None, **options: Any) -> None:
    sync = gs.attach(scene.model, scene.optimizer, plan, **options)
    scene.train(scene.model)
    while sync.drain():
        scene.optimizer.step()
    sync.detach()


def observe(scene: Scene) -> None:
    observer = gs.observe(scene.ddp, trace=scene.folder / "observed")
    scene.train(scene.ddp)
    observer.stats()
    observer.close()


def hook(scene: Scene) -> None:
    state, work = gs.ddp_hook(gs.Plan(compress=gs.powersgd(2)), scene.ddp)
    scene.ddp.register_comm_hook(state, work)
    scene.train(scene.ddp)
    state.stats()
    state.close()


def cluster(scene: Scene) -> None:
    one = gs.Cluster(((0,), (1,)), LINK, LINK)
    file = scene.folder / f"cluster-{torch.distributed.get_rank()}.toml"
    one.save(file)
    gs.Cluster.load(file)


def spawned() -> int:
    return torch.distributed.get_world_size()


def error(kind: type[Exception], *more: Any) -> Case:
    return lambda scene: str(kind("said", *more))


CALLS: dict[str, Case] = {
    "BackwardAborted": error(gs.BackwardAborted),
    "Cluster": cluster,
    "Disagreement": error(gs.Disagreement),
    "GradSync": lambda scene: train(scene, gs.Plan(), guard=gs.Guard(drift="repair", nonfinite="skip")),
    "GradSyncError": error(gs.GradSyncError),
    "Guard": lambda scene: gs.Guard(timeout=5, drift="repair"),
    "LaunchError": error(gs.LaunchError),
    "Link": lambda scene: gs.Link(1e-5, 1e9),
    "ModelProfile": lambda scene: scene.profile().compute_s,
    "NonFinite": error(gs.NonFinite),
    "NotEnoughMemory": error(gs.NotEnoughMemory),
    "PeerFault": error(gs.PeerFault, [0]),
    "PeerLost": error(gs.PeerLost, [0]),
    "Plan": lambda scene: gs.Plan.from_canonical(gs.Plan(compress=gs.int8()).canonical()),
    "RankFailed": error(gs.RankFailed),
    "SyncTimeout": error(gs.SyncTimeout, [0]),
    "accumulate": plan(pace=gs.accumulate(2)),
    "across_hosts": plan(compress=gs.across_hosts(gs.int8())),
    "all_reduce": lambda scene: gs.all_reduce(scene.tensor),
    "async_sgd": plan(pace=gs.async_sgd(max_staleness=2)),
    "attach": lambda scene: train(scene, trace=scene.folder / "attached"),
    "auto": lambda scene: train(scene, gs.auto(allow="lossy", steps=2)),
    "bf16": plan(compress=gs.bf16()),
    "by_parameter": plan(compress=gs.by_parameter([gs.rule("*.weight", compress=gs.int8())])),
    "ddp_hook": hook,
    "delayed": plan(pace=gs.delayed(1)),
    "diloco": plan(pace=gs.diloco(2)),
    "error_feedback": plan(compress=gs.error_feedback(gs.bf16())),
    "every_step": plan(pace=gs.every_step()),
    "fp16": plan(compress=gs.fp16()),
    "gossip": plan(pace=gs.gossip()),
    "halving_doubling": plan(algorithm=gs.halving_doubling()),
    "hierarchical": plan(algorithm=gs.hierarchical()),
    "init": lambda scene: gs.init(),
    "int4": plan(compress=gs.int4(), audit_every=2),
    "int8": plan(compress=gs.int8(rounding="stochastic"), audit_every=2),
    "local_sgd": plan(pace=gs.local_sgd(2)),
    "native": plan(algorithm=gs.native()),
    "nesterov": plan(pace=gs.diloco(2, outer=gs.nesterov(lr=0.5))),
    "observe": observe,
    "powersgd": plan(compress=gs.powersgd(2)),
    "profile": lambda scene: scene.profile(),
    "randomk": plan(compress=gs.randomk(0.1)),
    "recommend": lambda scene: gs.recommend(scene.profile(), gs.Cluster(((0,), (1,)), LINK, LINK)),
    "ring": plan(algorithm=gs.ring()),
    "rule": lambda scene: gs.rule("*.weight", compress=gs.int8()),
    "shared_empty": lambda scene: gs.all_reduce(gs.shared_empty((100,)).zero_()),
    "shared_memory": plan(algorithm=gs.shared_memory()),
    "sign": plan(compress=gs.sign()),
    "spawn": lambda scene: None,  # not within a rank: the test does it
    "topk": plan(compress=gs.topk(0.1)),
    "tree": plan(algorithm=gs.tree()),
    "warmup": plan(compress=gs.warmup(gs.int8(), steps=2)),
}

MORE_CALLS: dict[str, Case] = {
    "gradsync probe": lambda scene: measure(torch.distributed.group.WORLD, brief=True),  # type: ignore[arg-type]
    "sync batch norm": lambda scene: revert(convert(scene.model)),
}


# Of the handle: what each name is asked in a training that has begun.
def enter(scene: Scene, context: Any) -> None:
    with context:
        pass


def within_no_sync(scene: Scene, sync: gs.GradSync) -> None:
    with sync.no_sync():
        scene.model(scene.batches[0]).sum().backward()
    scene.model(scene.batches[1]).sum().backward()
    scene.optimizer.zero_grad()


def joined(scene: Scene, sync: gs.GradSync) -> None:
    with sync.join():
        if torch.distributed.get_rank() == 0:
            scene.train(scene.model)


def weighted(scene: Scene, sync: gs.GradSync) -> None:
    sync.set_batch_weight(3.0)
    scene.model(scene.batches[0]).sum().backward()
    scene.optimizer.zero_grad()


HANDLE: dict[str, Callable[[Scene, gs.GradSync], object]] = {
    "broadcast": lambda scene, sync: sync.broadcast(),
    "data": lambda scene, sync: list(sync.data(scene.batches)),
    "detach": lambda scene, sync: None,  # every scene ends with it
    "drain": lambda scene, sync: sync.drain(),
    "dropped": lambda scene, sync: sync.dropped,
    "join": joined,
    "load_state_dict": lambda scene, sync: sync.load_state_dict(sync.state_dict()),
    "mid_window": lambda scene, sync: sync.mid_window,
    "naming_lost": lambda scene, sync: enter(scene, sync.naming_lost()),
    "no_sync": within_no_sync,
    "plan": lambda scene, sync: sync.plan,
    "replicas_equal": lambda scene, sync: sync.replicas_equal,
    "residuals": lambda scene, sync: sync.residuals(),
    "set_batch_weight": weighted,
    "state_dict": lambda scene, sync: (sync.state_dict(), sync.state_dict(all_ranks=True)),
    "stats": lambda scene, sync: sync.stats(),
}


@thawed()
def every_call(names: list[str], folder: Path) -> None:
    """In two ranks: each leaves all as it was."""
    warnings.simplefilter("ignore")  # what a compressor says of a rank of two is not what is asked here
    for name in names:
        case = (CALLS | MORE_CALLS)[name]
        with unusual():
            scene = Scene(folder)
            with unchanged(name):
                case(scene)
            del scene
        gc.collect()


@thawed()
def every_method(folder: Path) -> None:
    warnings.simplefilter("ignore")
    for name, method in HANDLE.items():
        with unusual():
            scene = Scene(folder)
            with unchanged(f"attach and GradSync.{name}"):
                sync = gs.attach(scene.model, scene.optimizer, gs.Plan(compress=gs.int8()))
                scene.train(scene.model)
                method(scene, sync)
                sync.detach()
