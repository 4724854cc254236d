"""What stands ready for a process group goes with the group."""

from __future__ import annotations

import gc
import threading
from typing import Any

import torch
import torch.distributed as dist

import gradsync as gs
from gradsync.exchange.group_cache import group_cache


def lane_threads() -> int:
    return sum(thread.name == "gradsync-lane" for thread in threading.enumerate())


def end_a_group() -> list[int]:
    """The threads of lanes: before a group, with it, and after it; somebody still holds its lane."""
    found = [lane_threads()]
    group = dist.new_group([0, 1])
    assert isinstance(group, dist.ProcessGroup)
    gs.all_reduce(torch.ones(3), group=group, algorithm=gs.ring())
    lane = group_cache(group).lane
    assert lane is group_cache(group).lane
    found.append(lane_threads())
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert lane.idle
    return [*found, lane_threads()]


def test_a_lane_is_closed_when_its_group_ends(run: Any) -> None:
    for before, meanwhile, after in run(end_a_group):
        assert before < meanwhile
        assert after == before
