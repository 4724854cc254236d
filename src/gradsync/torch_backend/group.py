"""The process group: all-reduce, reduce-scatter and all-gather of CPU tensors in shared memory, all else by gloo.

torch calls these methods from Python and, through its trampolines, from C++.

Note [Inner group]
    All else is handed on to a group of torch's own class with the same backends. Not to `super()`: the trampolines
    hold the interpreter while they call it, and gloo's threads, which need the interpreter to let go of a tensor while
    they hold gloo's lock, would wait for us while we wait for them. For the same reason every method that has a
    trampoline is replaced here.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    ProcessGroupGloo,
    ReduceScatterOptions,
    Store,
)

from gradsync.torch_backend import collectives, tensor_forms
from gradsync.torch_backend.collectives import Parts, TeamOperation, TeamQueue
from gradsync.torch_backend.device_backends import DeviceBackends
from gradsync.torch_backend.works import CompletedWork, Completer, GlooErrors, IntegerMean, NamingWork, SharedWork
from gradsync.transport.lane import Lane

Tensors = list[torch.Tensor]

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
torch_barrier = dist.monitored_barrier  # before ours takes its place
_DELEGATED = (
    *("broadcast", "reduce", "gather", "scatter", "barrier", "monitored_barrier", "send", "recv", "recv_anysource"),
    *("allgather_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
)
# In shared memory where that can be. The names that end in "single" came with torch 2.13.
_GATHERED = (
    *("allgather", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced"),
)
_SCATTERED = (
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
)


class GradsyncGroup(dist.ProcessGroup):
    """The ranks of a group; made by `dist.init_process_group` and `dist.new_group`."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        gloo: ProcessGroupGloo,
        lane: Lane | None,
        timeout: timedelta,
        nccl_options: Any,
    ) -> None:
        # Only without a store can a group be written in Python.
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stubs know only the other way
        self._store = store
        self._inner = dist.ProcessGroup(store, rank, size)
        self._devices = DeviceBackends(self, self._inner, store, gloo, timeout, nccl_options)
        self._gloo = gloo
        self._lane = lane
        self._gloo_errors = GlooErrors(lane) if lane is not None else None
        self._queue: TeamQueue | None = None
        if lane is not None and lane.one_host and lane.team is not None:
            self._queue = TeamQueue(lane, lane.team)
            self._completer = Completer(lane.hire())

    # Sums

    def allreduce(self, tensors: Any, opts: Any = None, **others: Any) -> dist.Work:  # type: ignore[override]
        """Shared memory for what `dist.all_reduce` and C++ ask for; gloo for the overloads with `op` and `timeout`."""
        if isinstance(tensors, list) and len(tensors) == 1 and isinstance(opts, AllreduceOptions | None) and not others:
            return self._reduce("allreduce", tensors, AllreduceOptions() if opts is None else opts)
        return self._delegate("allreduce", (tensors,) if opts is None else (tensors, opts), others)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        return self._reduce("allreduce_coalesced", tensors, AllreduceCoalescedOptions() if opts is None else opts)

    def _reduce(self, name: str, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        tensor_forms.check(name, (tensors,))
        if opts.reduceOp.op == dist.ReduceOp.AVG and all(each.dtype in _INTEGERS for each in tensors):
            opts.reduceOp = dist.ReduceOp.SUM
            return IntegerMean(self._reduce(name, tensors, opts), tensors, self.size())
        if self._queue is not None and collectives.summable(tensors, opts.reduceOp):
            made = [collectives.all_reduce(self._queue.team, each, opts.reduceOp) for each in tensors]
            return self._share(self._queue, made, tensors, opts)
        return self._delegate(name, (tensors, opts), {})

    def _share(self, queue: TeamQueue, made: list[TeamOperation], results: list[torch.Tensor], opts: Any) -> dist.Work:
        """Do these in shared memory, at once or as a work."""
        asked = opts.timeout.total_seconds()
        limit = asked if asked > 0 else self._limit
        if not opts.asyncOp:
            queue.now(made, limit)
            return CompletedWork(results)
        return SharedWork(queue, self._completer, made, results, limit)

    # Parts: what FSDP sends

    def _gather(self, name: str, wheres: list[Parts], mines: Tensors, opts: Any, args: tuple[Any, ...]) -> dist.Work:
        """Give each of `mines` to all; `wheres`: the parts that each rank's goes to. `args`: how torch put it."""
        queue, size = self._queue, self.size()
        pairs = list(zip(wheres, mines, strict=False))
        if queue is None or len(wheres) != len(mines) or not all(collectives.gatherable(*pair, size) for pair in pairs):
            return self._delegate(name, args, {})
        made = [collectives.all_gather(queue.team, where, mine) for where, mine in pairs]
        results = [each for where in wheres for each in ([where] if isinstance(where, torch.Tensor) else where)]
        return self._share(queue, made, results, AllgatherOptions() if opts is None else opts)

    def _scatter(self, name: str, parts: list[Parts], outs: Tensors, opts: Any, args: tuple[Any, ...]) -> dist.Work:
        """The sum of what all have for this rank, into each of `outs`; `parts`: what each rank is to get."""
        queue, size = self._queue, self.size()
        opts = ReduceScatterOptions() if opts is None else opts
        pairs, add = list(zip(parts, outs, strict=False)), opts.reduceOp
        if (
            queue is None
            or len(parts) != len(outs)
            or not all(collectives.scatterable(*pair, add, size) for pair in pairs)
        ):
            return self._delegate(name, args, {})
        made = [collectives.reduce_scatter(queue.team, part, out, add) for part, out in pairs]
        return self._share(queue, made, outs, opts)

    # All the rest

    def _delegate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The collective as torch does it, with the dead named."""
        tensor_forms.check(name, args)
        self._devices.complete()
        try:
            work = getattr(self._inner, name)(*args, **kwargs)
        except RuntimeError as error:
            if self._gloo_errors is None:
                raise
            raise self._gloo_errors.named(name, error) from error
        return work if self._gloo_errors is None or work is None else NamingWork(work, name, self._gloo_errors)

    # What torch asks of a group

    def getBackendName(self) -> str:
        return "gradsync"

    def get_group_store(self) -> Store:
        return self._store

    @property
    def _limit(self) -> float:
        """Seconds, as gloo has them: torch changes them there (`_set_pg_timeout`)."""
        return self._gloo.options._timeout.total_seconds()

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)
        self._gloo._set_default_timeout(timeout)

    def _get_backend(self, device: torch.device) -> Any:
        self._devices.complete()
        return super()._get_backend(device)

    @property
    def _device_types(self) -> list[torch.device]:
        self._devices.complete()
        return super()._device_types

    @property
    def group_name(self) -> Any:
        # Functional collectives go from the name straight to C++. While torch compiles, nothing is sent.
        if not torch.compiler.is_compiling():
            self._devices.complete()
        return self._name

    def _set_group_name(self, name: Any) -> None:
        self._name = name  # kept here too: torch 2.11 cannot compile what asks `super()` for it
        super()._set_group_name(name)

    def shutdown(self) -> None:
        """Close the group; `dist.destroy_process_group` calls this."""
        if self._lane is not None:
            self._lane.close(together=self._lane.idle)
            self._lane = self._gloo_errors = self._queue = None
        self._inner.shutdown()

    def abort(self) -> None:
        self._inner.abort()


def _delegated(name: str) -> Callable[..., Any]:
    def collective(self: GradsyncGroup, *args: Any, **kwargs: Any) -> Any:
        return self._delegate(name, args, kwargs)

    return collective


def _gathered(name: str) -> Callable[..., Any]:
    """A collective of one tensor, or of a list of them."""

    def collective(self: GradsyncGroup, outputs: Any, inputs: Any, opts: Any = None, **others: Any) -> dist.Work:
        args = (outputs, inputs) if opts is None else (outputs, inputs, opts)
        if others or not isinstance(opts, AllgatherOptions | None):  # an overload with a timeout
            return self._delegate(name, args, others)
        if isinstance(outputs, torch.Tensor):
            return self._gather(name, [outputs], [inputs], opts, args)
        return self._gather(name, outputs, inputs if isinstance(inputs, list) else [], opts, args)

    return collective


def _scattered(name: str) -> Callable[..., Any]:
    """A collective of one tensor, or of a list of them."""

    def collective(self: GradsyncGroup, outputs: Any, inputs: Any, opts: Any = None, **others: Any) -> dist.Work:
        args = (outputs, inputs) if opts is None else (outputs, inputs, opts)
        if others or not isinstance(opts, ReduceScatterOptions | None):  # an overload with an operation and a timeout
            return self._delegate(name, args, others)
        if isinstance(outputs, torch.Tensor):
            single = isinstance(inputs, torch.Tensor)
            return self._scatter(name, [inputs] if single else [], [outputs], opts, args)
        return self._scatter(name, inputs, outputs, opts, args)

    return collective


for _names, _make in ((_DELEGATED, _delegated), (_GATHERED, _gathered), (_SCATTERED, _scattered)):
    for _name in _names:
        if _name in vars(dist.ProcessGroup):
            _method = _make(_name)
            _method.__name__ = _name
            setattr(GradsyncGroup, _name, _method)


def monitored_barrier(
    group: dist.ProcessGroup | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Torch's own refuses every backend that is not called gloo; other groups than ours get torch's own."""
    chosen = dist.group.WORLD if group is None else group
    if not isinstance(chosen, GradsyncGroup):
        torch_barrier(group, timeout, wait_all_ranks)
        return
    limit = timedelta(seconds=chosen._limit) if timeout is None else timeout
    chosen._delegate("monitored_barrier", (limit, wait_all_ranks), {})
