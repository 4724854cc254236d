"""What the processes of a scene do when the fault lies in a beginning: groups, meetings and connections are made.

    met │ come │ sight │ set │ wait │ get │ agreed            of `gs.init`: seat │ met │ sight │ forming │ formed

The victim acts when it comes to the named point: before it has met anybody; when its record is there and it waits;
when all records were there; before and after its address is in the store; with the first address of a peer in hand;
when all is connected.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from injector import until
from nursery import Journal
from plays import make_store
from torch._C._distributed_c10d import FileStore

import gradsync as gs
import gradsync.backend  # its name for `new_group`
from gradsync.autotune.controller import switch
from gradsync.engine import assemble, attach
from gradsync.engine.assemble import Builder
from gradsync.errors import PeerFault
from gradsync.launch import forming, init
from gradsync.transport import host_meeting
from gradsync.transport.connecting import PolledStore
from gradsync.transport.host_discovery import HostDiscovery
from gradsync.transport.host_meeting import GroupMeeting, declare_host
from gradsync.transport.host_processes import is_gone
from gradsync.transport.store_tree import StoreTree

POINTS: dict[str, tuple[Any, str]] = {
    "met": (GroupMeeting, "hold"),
    "merge": (StoreTree, "merge"),
    "mapped": (HostDiscovery, "_hear_beyond"),
    "come": (HostDiscovery, "_look_out"),
    "sight": (HostDiscovery, "_compare_sights"),
    "set": (PolledStore, "set"),
    "wait": (PolledStore, "wait"),
    "get": (PolledStore, "get"),
    "agreed": (assemble, "check_attach"),
    "seat": (init, "_choose_placement"),
    "forming": (dist, "init_process_group"),
    "formed": (forming, "_hear_all"),
}
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def begin(
    rank: int,
    ranks: int,
    folder: Path,
    what: str,
    victim: int,
    point: str,
    act: str,
    guard: dict[str, Any],
    time: int = 1,
    remote: bool = False,
    tcp: bool = False,
    interrupted: int = -1,
    patient: int = -1,
    last: int = -1,
    block: int = 0,
) -> None:
    """Begin `what`; the victim acts at its `time`-th coming to the point. Rank `interrupted` hears Ctrl-C then.

    Rank `patient` notices silence later than the others. Rank `last` begins when all other processes have ended.
    Ranks meet in blocks of `block`.
    """
    if block:
        host_meeting.BLOCK = block
    if rank == patient:
        guard = guard | {"dead_after": 3 * guard["dead_after"]}
    journal = Journal(folder / f"rank-{rank}.jsonl")
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if remote:
        declare_host(f"h{rank}")
    if what == "init":
        os.environ |= _environment(rank, ranks, folder)
    else:
        store = make_store(folder, rank, ranks, tcp)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
        dist.all_reduce(torch.zeros(1))
    pids = _tell_pids(folder, rank, ranks)
    bystander = Journal(folder / f"rank-{interrupted}.jsonl")

    def interrupt() -> None:
        if interrupted >= 0:
            until(lambda: any(event["event"] == "beginning" for event in bystander.read()))
            os.kill(pids[interrupted], signal.SIGINT)

    model, arm = torch.nn.Linear(4, 4), _arm(journal, point, act, time, interrupt)
    builders = _keep_builders()
    if what in ("switch", "again"):
        sync = _attach(model, gs.Plan(), guard)
        dist.barrier()
    if rank == victim:
        arm()
    if rank == last:
        until(lambda: all(is_gone(pid) for peer, pid in pids.items() if peer != last))
    try:
        journal.write("beginning")
        if what == "switch":
            switch(sync._steps, builders[0], gs.Plan(bucket_bytes=2048))
        else:
            _BEGINNINGS[what](model, guard)
        journal.write("begun")
        threading.Event().wait(60)
    except BaseException as error:
        journal.write(
            "raised",
            kind=type(error).__name__,
            ranks=list(error.ranks) if isinstance(error, PeerFault) else None,
            text=str(error),
            threads=[thread.name for thread in threading.enumerate() if thread.name.startswith("gradsync-connect")],
        )


def _attach(model: torch.nn.Module, plan: gs.Plan, guard: dict[str, Any]) -> gs.GradSync:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return gs.attach(model, optimizer, plan, guard=gs.Guard(**guard))


_BEGINNINGS: dict[str, Callable[[torch.nn.Module, dict[str, Any]], Any]] = {
    "attach": lambda model, guard: _attach(model, gs.Plan(), guard),
    "again": lambda model, guard: _attach(torch.nn.Linear(2, 2), gs.Plan(), guard),
    "gossip": lambda model, guard: _attach(model, gs.Plan(pace=gs.gossip()), guard),
    "async_sgd": lambda model, guard: _attach(model, gs.Plan(pace=gs.async_sgd(max_staleness=1)), guard),
    "across_hosts": lambda model, guard: _attach(model, gs.Plan(gs.hierarchical()), guard),
    "all_reduce": lambda model, guard: gs.all_reduce(torch.ones(3)),
    "backend": lambda model, guard: dist.new_group(backend="cpu:gradsync", timeout=timedelta(seconds=guard["timeout"])),
    "init": lambda model, guard: gs.init(timeout=guard["timeout"]),
}


def _arm(journal: Journal, point: str, act: str, time: int, interrupt: Callable[[], None]) -> Callable[[], None]:
    """What puts the fault in its place, in the victim."""
    owner, name = POINTS[point]
    count = 0

    def put() -> None:
        function = getattr(owner, name)

        def reach_then_call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == time:
                journal.write("act")
                interrupt()
                if act == "stall":
                    threading.Event().wait()
                os.kill(os.getpid(), _SIGNALS[act])
            return function(*args, **kwargs)

        setattr(owner, name, reach_then_call)

    return put


def _keep_builders() -> list[Builder]:
    """Those that attach makes from now on: `gs.auto()` keeps one, to change the plan with."""
    made = []

    class Kept(Builder):
        def open(self, *args: Any) -> Any:
            made.append(self)
            return super().open(*args)

    attach.Builder = Kept  # type: ignore[misc]
    return made


def _tell_pids(folder: Path, rank: int, ranks: int) -> dict[int, int]:
    store = FileStore(str(folder / "pids"), ranks)
    store.set(str(rank), str(os.getpid()))
    return {peer: int(store.get(str(peer))) for peer in range(ranks)}


def _environment(rank: int, ranks: int, folder: Path) -> dict[str, str]:
    """As torchrun sets it, with a port of the kernel's choice that stays bound until rank 0 listens."""
    meeting = FileStore(str(folder / "port"), ranks)
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as holder:
            meeting.set("port", str(holder.getsockname()[1]))
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": meeting.get("port").decode()}
    return {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
