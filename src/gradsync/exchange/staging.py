"""Between the memory in which payloads are made and the memory in which they travel.

The same where the wire can read it: host memory on gloo, GPU memory on NCCL. Payloads of a GPU on gloo are copied to
pinned memory and back, by the stream of the desk, whose thread waits for them: no other does.
"""

from __future__ import annotations

import weakref

import torch

HOST = torch.device("cpu")


class Staged:
    """A tensor where the device works on it (`near`), and where it travels (`wire`)."""

    def __init__(self, near: torch.Tensor, wire: torch.Tensor) -> None:
        self.near, self.wire = near, wire
        self._apart = near.device != wire.device
        if self._apart:
            pin(wire, self)

    @classmethod
    def beside(cls, wire: torch.Tensor, device: torch.device) -> Staged:
        """For payloads made on `device`, which travel in `wire`."""
        return cls(wire if wire.device == device else torch.empty_like(wire, device=device), wire)

    def down(self, part: int | slice = slice(None)) -> None:
        """What was made goes to the wire's memory; it is there on return."""
        if self._apart:
            self.wire[part].copy_(self.near[part], non_blocking=True)
            torch.cuda.current_stream(self.near.device).synchronize()

    def up(self) -> None:
        """What arrived goes back, in the order of the stream."""
        if self._apart:
            self.near.copy_(self.wire, non_blocking=True)


def wire_device(device: torch.device, on_host: bool) -> torch.device:
    """Where tensors of `device` travel, if its channel works on the host or not."""
    return HOST if on_host else device


def pin(memory: torch.Tensor, owner: object) -> None:
    """Register host memory with the driver, while its owner lives.

    Best effort: copies from memory that is not registered work too, only slower.
    """
    torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel() * memory.element_size(), 0)
    weakref.finalize(owner, _unpin, memory)


def _unpin(memory: torch.Tensor) -> None:
    """Before it is unmapped: the finalizer held it until now."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
