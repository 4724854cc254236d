"""What gradients travel by, for the ranks of a test: on hosts that the test names."""

from __future__ import annotations

import torch
import torch.distributed as dist

import gradsync as gs
from gradsync.exchange.choose_route import ExactSum
from gradsync.exchange.flat import FlatBucket, Item, lay_out
from gradsync.exchange.group_cache import group_cache
from gradsync.exchange.sender import GradientExchange, Sender
from gradsync.transport import lane as lane_module
from gradsync.transport.host_meeting import declare_host

CPU = torch.device("cpu")
TIMEOUT_S = 60.0


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def open_exchange(plan: gs.Plan, hosts: str, has_library: bool = True) -> GradientExchange:
    """`hosts` has a letter for each rank, that of its host; every rank calls this at once, first of all.

    `has_library` False: as on a machine without a compiler.
    """
    original = lane_module.load
    declare_host(hosts[dist.get_rank()])
    if not has_library:
        lane_module.load = lambda: None  # type: ignore[assignment]
    try:
        lane = group_cache(world()).lane
    finally:
        declare_host(None)
        lane_module.load = original
    exact = ExactSum(lane, world(), plan.algorithm, [CPU])
    return GradientExchange(lane, exact, Sender(lane, world(), exact, plan, CPU))


def bucket_of(exchange: GradientExchange, index: int, **tensors: torch.Tensor) -> FlatBucket:
    """A bucket with these tensors in it."""
    items, form = lay_out([Item.like(name, tensor) for name, tensor in tensors.items()])
    flat_bucket = FlatBucket(index, exchange.exact.allocate([form])[0], items, exchange.sender.choose(items[0].param))
    for item in items:
        item.of(flat_bucket.flat).copy_(tensors[item.name])
    return flat_bucket


def travel(exchange: GradientExchange, *flat_buckets: FlatBucket) -> None:
    """One step of them."""
    under_way = [exchange.sender.launch(flat_bucket) for flat_bucket in flat_buckets]
    exchange.sender.flush()
    for pending in under_way:
        exchange.lane.wait(pending)


def random(rank: int, *shape: int) -> torch.Tensor:
    """That rank's numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))
