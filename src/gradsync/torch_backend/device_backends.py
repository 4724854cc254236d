"""Other devices of the group, as the backend's string names them: `cpu:gradsync,cuda:nccl`.

torch makes no further backends for a group that is written in Python, and tells it the string only when the group is
made. So they are made here, when the group is first used; on every member at once, as it is with nccl itself.
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

Kind = dist.ProcessGroup.BackendType


class DeviceBackends:
    """Registers a backend for each device of a group, and of its inner one."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        inner: dist.ProcessGroup,
        store: Store,
        gloo: ProcessGroupGloo,
        timeout: timedelta,
        options: Any,
    ) -> None:
        """`options` are nccl's: the user's, or torch's own where nccl comes first in the string."""
        if options is not None and (not dist.is_nccl_available() or not isinstance(options, _nccl().Options)):
            raise ValueError(
                f"the gradsync backend takes pg_options for nccl only, got {type(options).__name__}; leave them out"
            )
        self._options = options
        self._group = weakref.ref(group)
        self._inner = inner
        self._store = PrefixStore("devices", store)
        self._gloo = gloo
        self._timeout = timeout
        self._complete = False
        for each in (group, inner):
            each._set_default_backend(Kind.GLOO)
        self._register(group, "cpu", Kind.GLOO, gloo)

    def complete(self) -> None:
        """Register what the group's string names, once the group is known to torch."""
        group = self._group()
        if self._complete or group is None or group not in dist.distributed_c10d._world.pg_backend_config:
            return
        for pair in dist.get_backend_config(group).split(","):
            device, _, name = pair.partition(":")
            if device != "cpu":
                kind, backend = self._backend(group, device, name)
                self._register(group, device, kind, backend)
        self._complete = True

    def _register(self, group: dist.ProcessGroup, device: str, kind: Kind, backend: Any) -> None:
        for each in (group, self._inner):
            each._register_backend(torch.device(device), kind, backend)

    def _backend(self, group: dist.ProcessGroup, device: str, name: str) -> tuple[Kind, Any]:
        if name in ("gradsync", "gloo"):
            return Kind.GLOO, self._gloo
        if name == "nccl":
            if not dist.is_nccl_available():
                raise ValueError(f"this torch was built without NCCL, which {device}:nccl asks for; say {device}:gloo")
            return Kind.NCCL, self._make_nccl(group)
        raise ValueError(
            f"beside cpu:gradsync there can be gloo or nccl, got {device}:{name}; make two groups, one with "
            f'init_process_group("{name}") and one with new_group(backend="cpu:gradsync")'
        )

    def _make_nccl(self, group: dist.ProcessGroup) -> Any:
        options = _nccl().Options() if self._options is None else self._options
        options._timeout = self._timeout
        options.global_ranks_in_group = self._gloo.options.global_ranks_in_group
        options.group_name = self._gloo.options.group_name
        backend = _nccl()(self._store, group.rank(), group.size(), options)
        backend._set_sequence_number_for_group()
        return backend


def _nccl() -> Any:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # only in builds with NCCL

    return ProcessGroupNCCL
