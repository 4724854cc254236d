"""Tensors of a GPU on gloo: through pinned host memory, piece by piece, by whatever way host memory takes.

    copy stream   ├ down 0 ┼ down 1 ┼ up 0 ┼ down 2 ┼ up 1 ┤ …
    lane's thread          ├ sum 0 ─┤      ├ sum 1 ─┤ …

Gloo's own way would stage the whole tensor and send it through loopback.
"""

from __future__ import annotations

from typing import Protocol

import torch

from gradsync.errors import NotEnoughMemory
from gradsync.exchange.rounds import stamp
from gradsync.exchange.staging import pin
from gradsync.transport.lane import Lane
from gradsync.transport.tickets import Ticket

_SLOT_NBYTES = 4 << 20
_NUM_SLOTS = 3


class HostRoute(Protocol):
    """A way for tensors in host memory."""

    @property
    def name(self) -> str: ...

    @property
    def wire_share(self) -> float: ...

    def run(self, flat: torch.Tensor, mark: int) -> None:
        """Sum it now, on the lane's thread."""


class PinnedRoute:
    """Stages pieces for another route."""

    def __init__(self, lane: Lane, inner: HostRoute, device: torch.device) -> None:
        """Every rank of the group makes it at once."""
        self.name = inner.name
        self.wire_share = inner.wire_share
        self._lane = lane
        self._inner = inner
        self._slots = _pinned_slots(lane)
        self._stream = torch.cuda.Stream(device)

    def launch(self, flat: torch.Tensor, bucket: int) -> Ticket:
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(flat.device))
        done = torch.cuda.Event()
        mark = stamp(self._lane.today, bucket)
        ticket = self._lane.send(
            lambda: self._run(flat, mark, ready, done), f"bucket {bucket}", flat.numel() * flat.element_size(), bucket
        )
        ticket.after = lambda: torch.cuda.current_stream(flat.device).wait_event(done)
        return ticket

    def _run(self, flat: torch.Tensor, mark: int, ready: torch.cuda.Event, done: torch.cuda.Event) -> None:
        pieces = flat.split(_SLOT_NBYTES // flat.element_size())
        down = [torch.cuda.Event() for _ in pieces]
        with torch.cuda.device(flat.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            for i in range(len(pieces) + 1):
                if i < len(pieces):
                    # In the order of the stream: what left this slot three pieces ago has left it.
                    self._slot(pieces[i], i).copy_(pieces[i], non_blocking=True)
                    down[i].record(self._stream)
                if i > 0:
                    down[i - 1].synchronize()
                    host = self._slot(pieces[i - 1], i - 1)
                    self._inner.run(host, mark)
                    pieces[i - 1].copy_(host, non_blocking=True)
            done.record(self._stream)
        flat.record_stream(self._stream)

    def _slot(self, piece: torch.Tensor, index: int) -> torch.Tensor:
        return self._slots[index % _NUM_SLOTS].view(piece.dtype)[: piece.numel()]


def _pinned_slots(lane: Lane) -> list[torch.Tensor]:
    """In the team's memory if there is one, so that sums are made where the pieces lie."""
    if lane.team is not None:
        try:
            memory = lane.team.allocate(_NUM_SLOTS * _SLOT_NBYTES)
        except NotEnoughMemory:
            pass
        else:
            pin(memory, lane)
            return list(memory[: _NUM_SLOTS * _SLOT_NBYTES].split(_SLOT_NBYTES))
    return [torch.empty(_SLOT_NBYTES, dtype=torch.uint8, pin_memory=True, device="cpu") for _ in range(_NUM_SLOTS)]
