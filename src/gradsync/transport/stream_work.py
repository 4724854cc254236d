"""Work that was issued to a stream of a GPU: the host never waits for it, other streams do."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradsync.transport.cuda_driver import has_happened
from gradsync.transport.current_stream import current_stream


class StreamWork:
    """A collective that was issued to a stream."""

    __slots__ = ("_device", "_done", "_keeps")

    def __init__(self, done: torch.cuda.Event, device: torch.device, keeps: object) -> None:
        self._done, self._device, self._keeps = done, device, keeps

    def wait(self) -> None:
        """Have the current stream wait for it; the host does not."""
        current_stream(self._device).wait_event(self._done)
        self._keeps = None

    def landed(self) -> bool:
        """Return whether the GPU is through with it; any thread may ask."""
        return has_happened(self._done.cuda_event)


def run_on_stream(stream: torch.cuda.Stream, issue: Callable[[], None], keeps: torch.Tensor) -> StreamWork:
    """Run `issue` on this stream, after all that the current stream does so far."""
    stream.wait_stream(current_stream(stream.device))
    done = torch.cuda.Event()
    with torch.cuda.stream(stream):
        issue()
        done.record()
    return StreamWork(done, stream.device, keeps)
