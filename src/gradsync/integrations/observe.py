"""`observe`: what a stock DistributedDataParallel model loses to synchronization, and to whom. It changes nothing.

Whether every rank of a group is about to observe is asked by the store alone: who is not there answers nothing.

    rank 0    here-0 ── looks … looks ── its patience: absent := "1", if nothing stands there ──▶ reads it: "1"
    rank 1    (does not observe: another job script, or no gradsync)
    rank 2              here-2 ── looks … sees that it stands there ───────────────────▶ reads it: "1"

It is written once, by whoever is first to see all ranks or to lose patience, so all that came read the same. Who comes
when it stands there already belongs to the next round.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from gradsync.agreement.header import header_nbytes
from gradsync.engine.bucket import GradEntry
from gradsync.engine.jit_modules import parameters_of
from gradsync.engine.parameters import unseen
from gradsync.engine.trace_step import Tracing, agree_on_trace, open_tracer, wanted
from gradsync.engine.user_hooks import hook_on
from gradsync.errors import GradSyncError, listed
from gradsync.integrations.ddp_hook import ignored_by
from gradsync.integrations.observe_checks import say
from gradsync.integrations.observer import Observer
from gradsync.plan.guard import Guard
from gradsync.transport.awake_clock import AwakeClock
from gradsync.transport.groups import group_timeout
from gradsync.transport.lane import open_lane
from gradsync.transport.sockets import connections

_OBSERVED = "observed already; call close() on its observer"
_ATTACHED = "attached already; call detach() on that GradSync"
_MOST_S = 20.0  # the longest wait of ours inside a training that would go on without us
_CALLED_S, _UNASKED_S = 30.0, 5.0  # for ranks to come: where the script calls `observe`, and where a variable does


class NotTogether(GradSyncError):
    """Some ranks do not observe, so that none compares or traces."""

    def __init__(self, missing: list[int], patience_s: float) -> None:
        super().__init__(
            f"{listed(missing)} did not come to observe this DistributedDataParallel within {patience_s:g} s; have "
            "every rank call gs.observe, or set GRADSYNC_TRACE on all hosts, with gradsync installed on each"
        )
        self.ranks = missing


def observe(
    ddp: DistributedDataParallel, *, trace: str | os.PathLike[str] | None = None, guard: Guard | None = None
) -> Observer:
    """Look on while DistributedDataParallel works: trace, blame and drift checks, and the very same training.

        observer = gs.observe(ddp, trace="runs/7")
        for x, y in observer.data(loader): ...
        observer.stats()["exposed_s"]

    Every rank of the model's process group calls this at once, before the first backward. If some do not come within
    30 s, or `Guard(timeout=)`, the others say so and train on: `stats()` then tells of this rank, and there is neither
    trace nor comparison. Or change nothing at all, and run with the environment variable GRADSYNC_TRACE=runs/7: then
    every DistributedDataParallel is observed.

    Args:
        ddp: The wrapped model.
        trace: The folder for the trace; None: that of GRADSYNC_TRACE, if there is one, else no trace.
        guard: Whether replicas are compared; see `Guard`. It can only tell: what DDP has averaged is averaged.
    """
    folder, guard, entries = _check_arguments(ddp, trace, guard)
    try:
        patience_s = _CALLED_S if guard.timeout is None else min(guard.timeout, _CALLED_S)
        return observe_together(ddp, folder, guard, entries, patience_s)
    except (GradSyncError, RuntimeError, OSError) as error:
        say(f"{error}. This rank is observed alone: stats() tells of it, without a trace and without comparison")
        return Observer(ddp, entries, guard, None)


def observe_all_or_none(ddp: DistributedDataParallel) -> None:
    """Observe with the trace of GRADSYNC_TRACE, or not at all."""
    folder, guard, entries = _check_arguments(ddp, None, None)
    observe_together(ddp, folder, guard, entries, _UNASKED_S)  # the model's hooks keep it alive


def observe_together(
    ddp: DistributedDataParallel, folder: Path | None, guard: Guard, entries: list[GradEntry], patience_s: float
) -> Observer:
    """An observer that hears of the other ranks; raises if not all of them come."""
    parent = ddp.process_group
    what = repr([(entry.name, tuple(entry.param.shape)) for entry in entries])
    if missing := absent(parent, what, patience_s):
        raise NotTogether(missing, patience_s)
    sockets = connections()  # DDP's among them; what others have carries little
    limit = guard.timeout if guard.timeout is not None else group_timeout(parent)
    lane = open_lane(parent, guard, min(limit, _MOST_S))  # its connections are more patient, as DDP's own are
    if len(lane.hosts) == 1:
        lane.open_team(header_nbytes(len(entries)))  # for headers: to wake gloo's threads for them takes a millisecond
    everywhere, run_id = agree_on_trace(lane, folder)
    tracing = None
    if folder is not None:
        tracer = open_tracer(folder, lane, entries, None, "ddp", run_id)
        tracing = Tracing(tracer, lane, everywhere, sockets)
    observer = Observer(ddp, entries, guard, lane)  # last: from here on it is called
    if tracing is not None:
        observer.trace(tracing)
    return observer


def _check_arguments(
    ddp: DistributedDataParallel, trace: str | os.PathLike[str] | None, guard: Guard | None
) -> tuple[Path | None, Guard, list[GradEntry]]:
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"observe(ddp) takes a DistributedDataParallel, got {type(ddp).__name__}; wrap the model first, or use "
            "gs.attach(model, optimizer, trace=folder)"
        )
    if guard is not None and not isinstance(guard, Guard):
        raise TypeError(f"guard must be a gs.Guard, got {guard!r}")
    return wanted(trace), Guard() if guard is None else guard, _entries_of(ddp)


def _entries_of(ddp: DistributedDataParallel) -> list[GradEntry]:
    """The parameters that DDP averages, in its order, each once; what others shard, or nobody has made, is left out."""
    seen = {id(tensor) for tensor in ignored_by(ddp)}
    entries: list[GradEntry] = []
    for prefix, module in ddp.module.named_modules():
        sparse = isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
        parameters = parameters_of(module)
        for key, param in unseen(parameters, seen):
            if is_lazy(param) or param.is_meta or type(param.data) is not torch.Tensor:
                continue
            name = f"{prefix}.{key}" if prefix else key
            if (hook := hook_on(param)) is not None:
                raise ValueError(f"parameter {name} is {_OBSERVED if hook.observes else _ATTACHED} first")
            entries.append(GradEntry(len(entries), name.replace("_orig_mod.", ""), param, parameters, key, sparse))
    if not entries:
        raise ValueError("there is nothing to observe: this DistributedDataParallel averages no parameter")
    return entries


_POLL_S = 0.01
_HERE, _ABSENT, _NOBODY = "here", "absent", "nobody"


def absent(parent: dist.ProcessGroup, what: str, patience_s: float) -> list[int]:
    """The ranks of `parent` that did not come to observe `what`: the same on all that did.

    Each look is a short question: a wait inside the store would hold other threads that ask it something.
    """
    ranks, me = dist.get_process_group_ranks(parent), dist.get_rank()
    missing = [rank for rank in ranks if rank != me]
    if not missing:
        return []
    store = _open_round(ranks, me, what)
    store.set(f"{_HERE}-{me}", "1")
    bound = AwakeClock(patience_s)
    while missing := [rank for rank in missing if not store.check([f"{_HERE}-{rank}"])]:
        if bound.over() or store.check([_ABSENT]):
            break
        time.sleep(_POLL_S)
    found = store.compare_set(_ABSENT, "", " ".join(map(str, missing)) or _NOBODY).decode()
    return [] if found == _NOBODY else [int(rank) for rank in found.split()]


def _open_round(ranks: list[int], me: int, what: str) -> Store:
    """The part of the store for the first round on which nothing is written yet."""
    home = f"gradsync/observe/{hashlib.sha256(repr((ranks, what)).encode()).hexdigest()[:16]}"
    store = dist.distributed_c10d._get_default_store()
    while True:
        part = PrefixStore(f"{home}/{store.add(f'{home}/round-of-{me}', 1)}", store)
        if not part.check([_ABSENT]):
            return part
