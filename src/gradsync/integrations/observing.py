"""`observe`: what a stock DistributedDataParallel model loses to synchronization, and to whom. It changes nothing."""

from __future__ import annotations

import os

from torch.nn.parallel import DistributedDataParallel

from gradsync.engine.inventory import take_inventory
from gradsync.engine.tracing import Tracing, accord, open_tracer, wanted
from gradsync.guard.header import HEAD_NBYTES
from gradsync.integrations.ddp import ignored_by
from gradsync.integrations.observer import Observer
from gradsync.policy import Guard
from gradsync.transport.groups import group_timeout
from gradsync.transport.lane import open_lane
from gradsync.transport.wires import connections


def observe(
    ddp: DistributedDataParallel, *, trace: str | os.PathLike[str] | None = None, guard: Guard | None = None
) -> Observer:
    """Look on while DistributedDataParallel works: trace, blame and drift checks, and the very same training.

        observer = gs.observe(ddp, trace="runs/7")
        for x, y in observer.data(loader): ...
        observer.stats()["exposed_s"]

    Every rank of the model's process group calls this at once, before the first backward. Or change nothing at all, and
    run with the environment variable GRADSYNC_TRACE=runs/7: then every DistributedDataParallel is observed.

    Args:
        ddp: The wrapped model.
        trace: The folder for the trace; None: that of GRADSYNC_TRACE, if there is one, else no trace.
        guard: Whether replicas are compared; see `Guard`. It can only tell: what DDP has averaged is averaged.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"observe(ddp) takes a DistributedDataParallel, got {type(ddp).__name__}; wrap the model first, or use "
            "gs.attach(model, optimizer, trace=folder)"
        )
    if guard is not None and not isinstance(guard, Guard):
        raise TypeError(f"guard must be a gs.Guard, got {guard!r}")
    folder, guard = wanted(trace), Guard() if guard is None else guard
    entries = take_inventory(ddp.module, (), ignored_by(ddp)).entries
    parent = ddp.process_group
    wires = connections()  # DDP's among them; what others have carries little
    lane = open_lane(parent, guard, guard.timeout if guard.timeout is not None else group_timeout(parent))
    if len(lane.hosts) == 1:
        lane.open_team(HEAD_NBYTES + len(entries))  # for headers: to wake gloo's threads for them takes a millisecond
    observer = Observer(ddp, lane, entries, guard)
    together, run_id = accord(lane, folder)
    if folder is not None:
        tracer = open_tracer(folder, lane, entries, None, "ddp", run_id)
        tracer.stats = observer.stats
        observer.trace(Tracing(tracer, lane, together, wires))
    return observer
