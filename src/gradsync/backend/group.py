"""The process group: sums of CPU tensors go to shared memory, every other collective to gloo.

torch calls these methods from Python and, through its trampolines, from C++.

Note [Inner group]
    All but sums is handed on to a group of torch's own class with the same backends. Not to `super()`: the trampolines
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
from torch._C._distributed_c10d import AllreduceCoalescedOptions, AllreduceOptions, ProcessGroupGloo, Store

from gradsync.backend.devices import Devices
from gradsync.backend.sums import Sums, summable
from gradsync.backend.witness import Witness, WitnessedWork
from gradsync.backend.works import Completer, Done, IntegerMean, SumWork
from gradsync.transport.lane import Lane

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
torch_barrier = dist.monitored_barrier  # before ours takes its place
_HANDED_ON = (
    *("broadcast", "reduce", "gather", "scatter", "barrier", "monitored_barrier", "send", "recv", "recv_anysource"),
    *("allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base"),
    # Names that came with torch 2.13.
    *("all_gather_single", "all_gather_single_coalesced", "all_to_all_single"),
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
        self._devices = Devices(self, self._inner, store, gloo, timeout, nccl_options)
        self._gloo = gloo
        self._lane = lane
        self._witness = Witness(lane) if lane is not None else None
        self._sums: Sums | None = None
        if lane is not None and lane.one_host and lane.team is not None:
            self._sums = Sums(lane, lane.team)
            self._completer = Completer(lane.hire())

    # Sums

    def allreduce(self, tensors: Any, opts: Any = None, **others: Any) -> dist.Work:  # type: ignore[override]
        """Shared memory for what `dist.all_reduce` and C++ ask for; gloo for the overloads with `op` and `timeout`."""
        if isinstance(tensors, list) and len(tensors) == 1 and isinstance(opts, AllreduceOptions | None) and not others:
            return self._reduce("allreduce", tensors, AllreduceOptions() if opts is None else opts)
        return self._hand_on("allreduce", (tensors,) if opts is None else (tensors, opts), others)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        return self._reduce("allreduce_coalesced", tensors, AllreduceCoalescedOptions() if opts is None else opts)

    def _reduce(self, name: str, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        if opts.reduceOp.op == dist.ReduceOp.AVG and _are_integers(tensors):
            opts.reduceOp = dist.ReduceOp.SUM
            return IntegerMean(self._reduce(name, tensors, opts), tensors, self.size())
        if self._sums is not None and summable(tensors, opts.reduceOp):
            return self._sum(self._sums, tensors, opts)
        return self._hand_on(name, (tensors, opts), {})

    def _sum(self, sums: Sums, tensors: list[torch.Tensor], opts: AllreduceOptions) -> dist.Work:
        asked = opts.timeout.total_seconds()
        limit = asked if asked > 0 else self._limit
        if not opts.asyncOp:
            sums.now(tensors, opts.reduceOp, limit)
            return Done(tensors)
        return SumWork(sums, self._completer, sums.start(tensors, opts.reduceOp), tensors, limit)

    # All the rest

    def _hand_on(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The collective as torch does it, with the dead named."""
        self._devices.complete()
        try:
            work = getattr(self._inner, name)(*args, **kwargs)
        except RuntimeError as error:
            if self._witness is None:
                raise
            raise self._witness.named(name, error) from error
        return work if self._witness is None or work is None else WitnessedWork(work, name, self._witness)

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
        """What `dist.destroy_process_group` calls."""
        if self._lane is not None:
            self._lane.close(together=self._lane.idle)
            self._lane = self._witness = self._sums = None
        self._inner.shutdown()

    def abort(self) -> None:
        self._inner.abort()


def _are_integers(tensors: list[torch.Tensor]) -> bool:
    return all(each.dtype in _INTEGERS for each in tensors)


def _handed_on(name: str) -> Callable[..., Any]:
    def collective(self: GradsyncGroup, *args: Any, **kwargs: Any) -> Any:
        return self._hand_on(name, args, kwargs)

    collective.__name__ = name
    return collective


for _name in _HANDED_ON:
    if _name in vars(dist.ProcessGroup):
        setattr(GradsyncGroup, _name, _handed_on(_name))


def monitored_barrier(
    group: dist.ProcessGroup | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """As torch's own, which refuses every backend that is not called gloo; other groups get torch's own."""
    chosen = dist.group.WORLD if group is None else group
    if not isinstance(chosen, GradsyncGroup):
        torch_barrier(group, timeout, wait_all_ranks)
        return
    limit = timedelta(seconds=chosen._limit) if timeout is None else timeout
    chosen._hand_on("monitored_barrier", (limit, wait_all_ranks), {})
