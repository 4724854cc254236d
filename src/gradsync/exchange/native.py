"""The backend's own all-reduce."""

from __future__ import annotations

import torch

from gradsync.transport.lane import Lane
from gradsync.transport.tickets import Ticket


class NativeRoute:
    """One collective per tensor; the backend does the rest."""

    name = "native"

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        # What any all-reduce must send at least: rings and NCCL send just that.
        self.wire_share = 2 * (lane.groups.size - 1) / lane.groups.size

    def launch(self, flat: torch.Tensor, bucket: int) -> Ticket:
        channel = self._lane.groups.data[flat.device.type]
        if channel.on_host and flat.dtype == torch.int16:
            raise ValueError("gloo cannot add int16; use int32, or gs.shared_memory() on one host")
        nbytes = flat.numel() * flat.element_size()
        return self._lane.launch(lambda: channel.sum(flat), f"bucket {bucket}", nbytes, bucket, channel.on_host)
