"""What the ranks of a scene do: they train until something happens, and write down what they saw of it."""

from __future__ import annotations

import signal
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from injector import Fault, Injector, SumInjector
from nursery import Journal
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.utils.data import DataLoader, TensorDataset

import gradsync as gs
from gradsync.algorithms import control_tree
from gradsync.compress.toml import from_canonical
from gradsync.errors import PeerFault
from gradsync.exchange.choose_route import ExactSum
from gradsync.exchange.flat import Form
from gradsync.exchange.group_cache import group_cache
from gradsync.transport.heartbeat import Phase
from gradsync.transport.host_meeting import declare_host
from gradsync.transport.lane import Lane, open_lane

_STEPS = 6


def train(
    rank: int,
    ranks: int,
    folder: Path,
    fault: dict[str, Any],
    guard: dict[str, Any],
    remote: bool = False,
    hosts: int = 0,
    fan_out: int = 0,
    tcp: bool = False,
    workers: int = 0,
    models: int = 1,
    together: bool = False,
    poisoned: int = -1,
    after: str = "exit",
    stall_after: str = "",
    compress: dict[str, Any] | None = None,
) -> None:
    """Train a few steps.

    `after` is what a rank does with an error before it exits: nothing, detach or destroy the groups; after an
    error named `stall_after` it stays. `remote`: every rank has a host of its own; `hosts`: one of so many, of which
    `fan_out` are in a subgroup. The rank `poisoned` meets a NaN in the fault's step.
    """
    journal = Journal(folder / f"rank-{rank}.jsonl")
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started pytest
    warnings.showwarning = lambda message, *_: journal.write("warned", text=str(message))  # type: ignore[assignment]
    warnings.simplefilter("always")
    if remote or hosts:
        declare_host(f"h{rank % hosts if hosts else rank}")
    if fan_out:
        control_tree.FAN_OUT = fan_out
    dist.init_process_group(
        "gloo", store=make_store(folder, rank, ranks, tcp), rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    injector = Injector(Fault(**fault), rank, journal)
    trainers = [_Trainer(guard, compress) for _ in range(models)]
    injector.install(trainers[-1].sync, trainers[-1].model, trainers[-1].optimizer)
    try:
        for injector.step, inputs in enumerate(_batches(rank, workers, journal)):
            if rank == poisoned and injector.step == injector.fault.step:
                inputs = inputs * float("nan")
            _step(trainers, inputs, injector, together)
    except BaseException as error:
        journal.write(
            "raised",
            kind=type(error).__name__,
            ranks=list(error.ranks) if isinstance(error, PeerFault) else None,
            text=str(error),
            step=injector.step,
            grads=[name for name, p in trainers[-1].model.named_parameters() if p.grad is not None],
        )
        if type(error).__name__ == stall_after:
            injector.stall()
        if after == "detach":
            trainers[-1].sync.detach()
        if after == "destroy":
            dist.destroy_process_group()
        return
    journal.write("finished")


def reduce(
    rank: int,
    ranks: int,
    folder: Path,
    fault: dict[str, Any],
    guard: dict[str, Any],
    by: str,
    shared: bool,
    numel: int,
    workers: int = 0,
) -> None:
    """Sum tensors in shared memory: `by` the worker beside this thread, or "all_reduce" in this thread.

    `shared`: where the tensor lies in the team's memory, else it is staged.
    """
    journal = Journal(folder / f"rank-{rank}.jsonl")
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    store = FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    lane, flat, add = _summing(by, shared, numel, gs.Guard(**guard))
    injector = SumInjector(Fault(**fault), rank, journal)
    injector.install(lane)
    loader = _batches(rank, workers, journal)
    next(loader)  # a forked child now holds all that its parent has open
    try:
        for injector.step in range(1, 5):
            injector.watch(flat.fill_(rank + 1))
            add(injector.step)
            assert bool((flat == ranks * (ranks + 1) / 2).all())
    except BaseException as error:
        culprits = list(error.ranks) if isinstance(error, PeerFault) else None
        journal.write("raised", kind=type(error).__name__, ranks=culprits, text=str(error), step=lane.step, grads=[])
        if by == "worker" and culprits is None:
            lane.fail()  # as the engine does
        return
    journal.write("finished")


def _summing(by: str, shared: bool, numel: int, guard: gs.Guard) -> tuple[Lane, torch.Tensor, Callable[[int], None]]:
    """The lane, the tensor, and what adds it up."""
    world = dist.group.WORLD
    assert world is not None
    if by == "all_reduce":
        flat = gs.shared_empty(numel) if shared else torch.zeros(numel)
        lane = group_cache(world).lane
        lane.session.continue_at(0)
        return lane, flat, lambda step: (gs.all_reduce(flat, op="sum"), None)[1]
    assert guard.timeout is not None
    lane = open_lane(world, guard, guard.timeout)
    lane.open_team(64)
    cpu = torch.device("cpu")
    exact = ExactSum(lane, world, None, [cpu])
    flat = exact.allocate([Form(numel, torch.float32, cpu)])[0] if shared else torch.zeros(numel)

    def add(step: int) -> None:
        lane.session.continue_at(step)
        lane.at(Phase.BACKWARD, 0)
        lane.wait(exact.launch(flat, 0))

    return lane, flat, add


class _Trainer:
    def __init__(self, guard: dict[str, Any], compress: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Linear(32, 16)]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        # Three buckets: 3.weight; 2.weight; 0.weight; with the biases between.
        plan = gs.Plan(compress=None if compress is None else from_canonical(compress), bucket_bytes=1024)
        self.sync = gs.attach(self.model, self.optimizer, plan, guard=gs.Guard(**guard))


def _step(trainers: list[_Trainer], inputs: torch.Tensor, injector: Injector, together: bool) -> None:
    """One step of every model: each with a backward of its own, or all in one."""
    losses = []
    for trainer in trainers:
        trainer.optimizer.zero_grad()
        injector.reach("before_forward")
        loss = trainer.model(inputs).square().mean()
        losses.append(loss)
        if not together:
            loss.backward()
    if together:
        sum(losses, torch.zeros(())).backward()
    injector.reach("after_sync")
    for trainer in trainers:
        trainer.optimizer.step()


def _batches(rank: int, workers: int, journal: Journal) -> Any:
    data = torch.randn(_STEPS, 8, 16, generator=torch.Generator().manual_seed(rank))
    if not workers:
        yield from data
        return
    loader = iter(DataLoader(TensorDataset(data), batch_size=None, num_workers=workers, prefetch_factor=1))
    journal.write("workers", pids=[worker.pid for worker in loader._workers])  # type: ignore[attr-defined]
    for (inputs,) in loader:
        yield inputs


def make_store(folder: Path, rank: int, ranks: int, tcp: bool) -> Store:
    if not tcp:
        return FileStore(str(folder / "store"), ranks)
    # The port is the kernel's choice, told to the others through a file.
    meeting = FileStore(str(folder / "port"), ranks)
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, ranks, True, timedelta(seconds=30), wait_for_workers=False)
        meeting.set("port", str(store.port))
        return store
    return TCPStore("127.0.0.1", int(meeting.get("port")), ranks, False, timedelta(seconds=30))


def run_out(rank: int, ranks: int, folder: Path, batches: list[int], how: str, remote: bool = False) -> None:
    """Train on unequally many batches; who has no more detaches, ends, or ends by an exception."""
    journal = Journal(folder / f"rank-{rank}.jsonl")
    torch.set_num_threads(1)
    if remote:
        declare_host(f"h{rank}")
    dist.init_process_group(
        "gloo",
        store=make_store(folder, rank, ranks, remote),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    model = torch.nn.Linear(3, 3)
    sync = gs.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        for _ in range(batches[rank]):
            model(torch.randn(2, 3)).sum().backward()
            sync._steps.step_counts.begin_anew()  # nobody steps here
        if how == "detach":
            sync.detach()
    except gs.GradSyncError as error:
        journal.write("raised", kind=type(error).__name__, text=str(error), step=sync._lane.step)
        return
    _await_others(sync._lane)
    if how == "error":
        raise ArithmeticError("a user's own exception")


def _await_others(lane: Lane) -> None:
    """Until every other rank waits in a step that this one will not come to; of another host nothing is seen."""
    deadline = time.monotonic() + 20
    lane.liveness.watch(True)
    while time.monotonic() < deadline:
        states = [view.state for view in lane.liveness.peer_views().values()]
        if all(state.phase is Phase.WAITING and state.step >= lane.step for state in states):
            return
        time.sleep(0.01)
    raise AssertionError("nobody waited")
