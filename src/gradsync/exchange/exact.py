"""The exact round trip: the flat bucket is summed in place by the backend's own all-reduce."""

from __future__ import annotations

import torch

from gradsync.transport.lane import Lane, Ticket


def launch_sum(lane: Lane, flat: torch.Tensor, bucket: int) -> Ticket:
    """Start summing `flat` over the ranks, in place."""
    channel = lane.groups.data[flat.device.type]
    return lane.launch(
        lambda: channel.sum(flat),
        f"bucket {bucket}",
        flat.numel() * flat.element_size(),
        bucket,
        channel.on_host,
    )
