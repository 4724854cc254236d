"""The beginning of a group: torch calls `open_group` on every member at once, before the group is known to anybody."""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import ProcessGroupGloo

from gradsync.plan.guard import Guard
from gradsync.torch_backend.group import GradsyncGroup
from gradsync.transport.groups import Groups
from gradsync.transport.lane import Lane
from gradsync.transport.liveness import Liveness

_BOARD_NBYTES = 64  # nothing is told over the boards of such a team
_DEAD_AFTER_S, _LONGEST_S = 10.0, 1e7


def open_group(options: Any, backend_options: Any) -> GradsyncGroup:
    """The group that torch asks for; `options` are torch's, `backend_options` the user's, for nccl."""
    store, rank, size = options.store, options.group_rank, options.group_size
    lane = _open_lane(options) if size > 1 else None
    gloo = ProcessGroupGloo(store, rank, size, timeout=options.timeout) if lane is None else lane.groups.control.backend
    gloo.options.global_ranks_in_group = options.global_ranks_in_group
    gloo.options.group_name = options.group_id
    gloo._set_sequence_number_for_group()
    return GradsyncGroup(store, rank, size, gloo, lane, options.timeout, backend_options)


def _open_lane(options: Any) -> Lane:
    """The lane of a group: who shares a host, their team, and heartbeats.

    The ranks talk over the group's own gloo: nobody else can use it yet.
    """
    store, rank, size = options.store, options.group_rank, options.group_size
    groups = Groups(rank, size, tuple(options.global_ranks_in_group or range(size)), store=store)
    timeout = options.timeout.total_seconds()
    # A rank that lives and holds the interpreter is late, as with gloo, and not lost; its end is seen at once.
    guard = Guard(dead_after=min(max(timeout, _DEAD_AFTER_S), _LONGEST_S))
    lane = Lane(groups, Liveness(groups, guard), guard, timeout, more_time="dist.init_process_group(timeout=...)")
    lane.meet()
    try:
        groups.add_control_at(store, options.timeout)
        if len(lane.hosts) > 1:
            lane.open_subgroups()
        lane.open_team(_BOARD_NBYTES)
    except BaseException:
        lane.close(together=False)
        raise
    return lane
