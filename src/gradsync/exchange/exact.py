"""The exact round trip: the flat bucket is summed in place by the backend's own all-reduce."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gradsync.transport.lane import Lane, Ticket


def launch_sum(lane: Lane, flat: torch.Tensor, bucket: int) -> Ticket:
    """Start summing `flat` over the ranks, in place."""
    group = lane.groups.data[flat.device.type]
    return lane.launch(
        lambda: dist.all_reduce(flat, group=group, async_op=True),
        f"bucket {bucket}",
        flat.numel() * flat.element_size(),
        bucket,
        lane.groups.on_host(flat.device.type),
    )
