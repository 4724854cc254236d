"""What stands ready for a process group goes with the group."""

from __future__ import annotations

import gc
import threading
from typing import Any

import torch
import torch.distributed as dist

import gradsync as gs
from gradsync.exchange.group_cache import group_cache


def lane_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "gradsync-lane"}


def end_a_group() -> tuple[int, int]:
    """How many threads a group's lane has, and how many of them after it, while somebody still holds the lane."""
    others = lane_threads()  # of tests before this one; they may end at any time
    group = dist.new_group([0, 1])
    assert isinstance(group, dist.ProcessGroup)
    gs.all_reduce(torch.ones(3), group=group, algorithm=gs.ring())
    lane = group_cache(group).lane
    assert lane is group_cache(group).lane
    its_own = lane_threads() - others
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert lane.idle
    return len(its_own), len(its_own & lane_threads())


def test_a_lane_is_closed_when_its_group_ends(run: Any) -> None:
    for meanwhile, after in run(end_a_group):
        assert (meanwhile, after) == (1, 0)
