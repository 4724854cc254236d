"""Ranks of a test as hosts of a small control tree, though they are processes of one machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from gradsync.algorithms import control_tree
from gradsync.transport.host_meeting import declare_host

HOSTS = {1: "a", 2: "ab", 3: "aab", 4: "aabb"}  # by the number of ranks: the host of each


def in_a_tree(fn: Callable[..., Any], hosts: str, *args: Any) -> Any:
    """`fn(*args)` where each rank is on its host of these, two of them in a subgroup."""
    before, control_tree.FAN_OUT = control_tree.FAN_OUT, 2
    declare_host(hosts[dist.get_rank()])
    try:
        return fn(*args)
    finally:
        declare_host(None)
        control_tree.FAN_OUT = before


def in_its_tree(fn: Callable[..., Any], *args: Any) -> Any:
    """The same for any number of ranks."""
    return in_a_tree(fn, HOSTS[dist.get_world_size()], *args)
