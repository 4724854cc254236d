"""Tensors of a GPU on gloo: through pinned host memory, piece by piece, by whatever way host memory takes.

    copy stream   ├ down 0 ┼ down 1 ┼ up 0 ┼ down 2 ┼ up 1 ┤ …
    lane's thread          ├ sum 0 ─┤      ├ sum 1 ─┤ …

Gloo's own way would stage the whole tensor and send it through loopback.

Payloads are made and travel in one memory where the channel can read it: host memory on gloo, GPU memory on NCCL. Those
of a GPU on gloo are copied to pinned memory and back, by the stream of the pipeline, whose thread waits for them: no
other does.
"""

from __future__ import annotations

import weakref

import torch

from gradsync.compress.rounds import Payload
from gradsync.errors import NotEnoughMemory
from gradsync.exchange.routes import HostRoute
from gradsync.exchange.schedule_runner import stamp
from gradsync.transport.groups import HOST
from gradsync.transport.lane import Lane
from gradsync.transport.pending import Pending


class StagedPayload(Payload):
    """A payload where the device works on it (`tensor`), and where it travels (`sent`)."""

    def __init__(self, nbytes: float, tensor: torch.Tensor, sent: torch.Tensor) -> None:
        super().__init__(nbytes)
        self.tensor, self.sent = tensor, sent
        self.staged = tensor.device != sent.device
        if self.staged:
            pin(sent, self)

    @classmethod
    def beside(cls, nbytes: float, sent: torch.Tensor, device: torch.device) -> StagedPayload:
        """A payload for what is made on `device`, and travels in `sent`."""
        return cls(nbytes, sent if sent.device == device else torch.empty_like(sent, device=device), sent)

    def copy_to_host(self, part: int | slice = slice(None)) -> None:
        """Bring what was made to where it travels; it is there on return."""
        self.sent[part].copy_(self.tensor[part], non_blocking=True)
        torch.cuda.current_stream(self.tensor.device).synchronize()

    def copy_to_device(self) -> None:
        """Copy what arrived back, in the order of the stream."""
        self.tensor.copy_(self.sent, non_blocking=True)


def travel_device(device: torch.device, on_host: bool) -> torch.device:
    """The device where tensors of `device` travel: the host, if its channel works there."""
    return HOST if on_host else device


def pin(memory: torch.Tensor, owner: object) -> None:
    """Register host memory with the driver, while its owner lives.

    Best effort: copies from memory that is not registered work too, only slower.
    """
    torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    weakref.finalize(owner, _unpin, memory)


def _unpin(memory: torch.Tensor) -> None:
    """Unregister memory before it is unmapped: the finalizer held it until now."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


_SLOT_NBYTES = 4 << 20
_NUM_SLOTS = 3


class PinnedRoute:
    """Stages pieces for another route."""

    sums_in_team_memory = False  # of tensors on a GPU none lies there

    def __init__(self, lane: Lane, inner: HostRoute, device: torch.device) -> None:
        """Every rank of the group makes it at once."""
        self.name = inner.name
        self.sent_share = inner.sent_share
        self._lane = lane
        self._inner = inner
        self._slots = _pinned_slots(lane)
        self._stream = torch.cuda.Stream(device)

    def launch(self, flat: torch.Tensor, bucket: int) -> Pending:
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(flat.device))
        done = torch.cuda.Event()
        tag = stamp(self._lane.current_step, bucket)
        pending = self._lane.send(lambda: self._run(flat, tag, ready, done), f"bucket {bucket}", flat.nbytes, bucket)
        pending.then(lambda: torch.cuda.current_stream(flat.device).wait_event(done))
        return pending

    def _run(self, flat: torch.Tensor, tag: int, ready: torch.cuda.Event, done: torch.cuda.Event) -> None:
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
                    self._inner.run(host, tag)
                    pieces[i - 1].copy_(host, non_blocking=True)
            done.record(self._stream)
        flat.record_stream(self._stream)

    def _slot(self, piece: torch.Tensor, index: int) -> torch.Tensor:
        return self._slots[index % _NUM_SLOTS].view(piece.dtype)[: piece.numel()]


def _pinned_slots(lane: Lane) -> list[torch.Tensor]:
    """Slots in the team's memory if there is one, so that sums are made where the pieces lie."""
    if lane.team is not None:
        try:
            memory = lane.team.allocate(_NUM_SLOTS * _SLOT_NBYTES)
        except NotEnoughMemory:
            pass
        else:
            pin(memory, lane)
            return list(memory[: _NUM_SLOTS * _SLOT_NBYTES].split(_SLOT_NBYTES))
    return [torch.empty(_SLOT_NBYTES, dtype=torch.uint8, pin_memory=True, device="cpu") for _ in range(_NUM_SLOTS)]
