"""A channel over NCCL: communicators of our own, which can be given up at any moment.

Note [Why not ProcessGroupNCCL]
    torch's object watches its collectives from a thread. After a rank died, that thread asks the default group for a
    dump of all collectives, and the default group's own thread then sleeps, up to eight minutes, and is waited for
    when the process exits. It also makes its communicator within the first collective, on the thread that trains, where
    nobody looks after the peers; and a call costs the host several times as much. So this file calls NCCL itself, on
    streams of torch's. The library is the one that torch has loaded.

Note [Streams]
    compute    ── fill bucket ──●── backward goes on ───────────── wait ──●── step
    channel                     └── all-reduce ──────────────●────────────┘

    A collective runs on the channel's stream, after what the current stream has been given before. Its work keeps the
    tensors alive until somebody's stream waits for it. Messages in a batch run on the current stream itself.

    NCCL may make connections within a call, and then the host waits in C for the other ranks. So a new communicator is
    used once in the thread that made it; what connects later is under the eyes of `stream_watch`.

Note [Giving up a communicator]
    A kernel that waits for a dead rank ends only when its communicator is aborted, which takes NCCL about a second.
    Communicators of one device may wait for each other's kernels: all are aborted at once, each by a thread.

Note [Sums of an aborted communicator]
    An aborted kernel ends with a part of its sum, and what the host has queued behind it runs: the optimizer, a copy
    for a checkpoint. Python hears of the death only after that. So the GPU itself must know: the first element of every
    bucket is multiplied by `alive` when it is delivered. That is 1.0, which changes no bit; NaN is written there
    before a communicator is aborted, and then no such weights look like good ones.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from ctypes import c_void_p
from typing import Any, Literal

import torch
from torch._C._distributed_c10d import Store

from gradsync.transport.awake_clock import AwakeClock
from gradsync.transport.connecting import Attempt, Connect
from gradsync.transport.cuda_driver import has_happened, only_look_on
from gradsync.transport.current_stream import current_stream
from gradsync.transport.nccl_library import BYTES, SUM, NcclError, code_of, load_nccl
from gradsync.transport.stream_work import StreamWork

_FIRST_NUMELS = (1, 1 << 22)  # NCCL has other ways for small sums than for large ones
_SLICE_S = 0.1
_CLOSING_S = 5.0
_SPOILING_S, _LOOK_S = 0.2, 0.001
_USING_S = 0.2  # for a call to return before its communicator is taken away


class _Communicator:
    """NCCL's communicator among the members of a channel, for one GPU of each."""

    def __init__(self, handle: c_void_p, device: torch.device) -> None:
        self.handle: c_void_p | None = handle
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.alive = torch.ones((), dtype=torch.float32, device=device)  # see [Sums of an aborted communicator]
        self._aside = torch.cuda.Stream(device, priority=-1)  # nothing waits there

    def take_handle(self) -> c_void_p | None:
        """The handle, for whoever is to end it."""
        handle, self.handle = self.handle, None
        return handle

    def spoil(self) -> None:
        """Have NaN in what is delivered from now on; returns when it is there, or after a moment."""
        done, bound = torch.cuda.Event(), AwakeClock(_SPOILING_S)
        with torch.cuda.stream(self._aside):
            self.alive.fill_(math.nan)
            done.record()
        while not has_happened(done.cuda_event) and not bound.over():
            time.sleep(_LOOK_S)


class NcclChannel:
    """Collectives and messages between GPUs, each started at once, on a stream."""

    on_host: Literal[False] = False

    def __init__(self, store: Store, rank: int, size: int, connect: Connect) -> None:
        self._store, self._rank, self._size, self._connect = store, rank, size, connect
        self._nccl = load_nccl()
        self._communicators: dict[int, _Communicator] = {}  # by the number of the GPU
        self._using = threading.Lock()  # a communicator is for one thread at a time
        self._ending = threading.Lock()  # for `_endings` and what belongs to it
        self._given_up = False
        self._endings: list[threading.Thread] = []
        self.num_calls = 0  # of NCCL, begun and ended: odd while one runs

    def open(self, device: torch.device, attempt: Attempt[Any]) -> None:
        """Make the communicator for this GPU, in the thread of an attempt; every member does so at once."""
        attempt.end_by(self.abort)
        pause, key = attempt.pauses(), f"nccl-{len(self._communicators)}"
        with torch.cuda.device(device):
            if self._rank == 0:
                self._store.set(key, self._nccl.unique_id().hex())
            while not self._store.check([key]):
                pause()
            name = bytes.fromhex(self._store.get(key).decode())
            made = _Communicator(self._nccl.connect(name, self._rank, self._size), device)
            with self._ending:
                self._communicators = {**self._communicators, torch.cuda.current_device(): made}
            if self._given_up:  # meanwhile
                self._end(made, self._nccl.abort)
            # NCCL connects ranks within the first collective of a size: here that may take its time.
            try:
                works = [self.sum(torch.zeros(n, dtype=torch.float32, device=device)) for n in _FIRST_NUMELS]
                while not all(work.landed() for work in works):
                    pause()
            except BaseException:
                self.abort()
                raise

    @property
    def alive(self) -> torch.Tensor:
        """One, as long as the sums on its first GPU may be trusted, then NaN; for a kernel to read when it runs."""
        return next(iter(self._communicators.values())).alive

    # Collectives

    def sum(self, tensor: torch.Tensor) -> StreamWork:
        """Add up `tensor` over the ranks, in place."""
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        pointer, count, code = real.data_ptr(), real.numel(), code_of(real.dtype)
        return self._issue(lambda c, s: self._nccl.all_reduce(pointer, pointer, count, code, SUM, c, s), real)

    def broadcast(self, tensor: torch.Tensor, source: int) -> StreamWork:
        """Make `tensor` that of the member with index `source`, in place."""
        pointer, count = tensor.data_ptr(), tensor.nbytes
        return self._issue(lambda c, s: self._nccl.broadcast(pointer, pointer, count, BYTES, source, c, s), tensor)

    def gather(self, rows: torch.Tensor, row: torch.Tensor) -> StreamWork:
        """Fill `rows` with every member's `row`, by index."""
        given, taken, count = row.data_ptr(), rows.data_ptr(), row.nbytes
        return self._issue(lambda c, s: self._nccl.all_gather(given, taken, count, BYTES, c, s), rows, row)

    def trade(self, rows: torch.Tensor, mine: torch.Tensor) -> StreamWork:
        """Give each member its equal part of `mine`, in order; fill `rows` with what each gives to us, by index."""
        given, taken, count = mine.data_ptr(), rows.data_ptr(), mine.nbytes // self._size
        send, recv = self._nccl.send, self._nccl.recv

        def all_parts(c: c_void_p, s: int) -> int:
            self._nccl.group_start()
            codes = [
                code
                for peer in range(self._size)
                for code in (
                    send(given + peer * count, count, BYTES, peer, c, s),
                    recv(taken + peer * count, count, BYTES, peer, c, s),
                )
            ]
            return max(self._nccl.group_end(), *codes)

        return self._issue(all_parts, rows, mine)

    def _issue(self, call: Callable[[c_void_p, int], int], *tensors: torch.Tensor) -> StreamWork:
        """Issue a collective to the channel's stream; see [Streams]."""
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise ValueError(f"NCCL takes contiguous tensors, got strides {tensor.stride()}")
        communicator = self._communicator(tensors[0].device)
        stream, done = communicator.stream, torch.cuda.Event()
        with self._using:
            stream.wait_stream(current_stream(communicator.device))
            self.num_calls += 1
            try:
                self._nccl.check(call(_handle(communicator), stream.cuda_stream))
            finally:
                self.num_calls += 1
            done.record(stream)
        return StreamWork(done, communicator.device, tensors)

    # Messages

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Start sending `tensor` to the member with index `dst`, inside of a `batch`."""
        communicator, stream = self._in_batch(tensor)
        self._nccl.check(self._nccl.send(tensor.data_ptr(), tensor.nbytes, BYTES, dst, _handle(communicator), stream))

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        """Fill `tensor` with what the member with index `src` sends; messages of one pair keep their order."""
        communicator, stream = self._in_batch(tensor)
        self._nccl.check(self._nccl.recv(tensor.data_ptr(), tensor.nbytes, BYTES, src, _handle(communicator), stream))

    def batch(self, device: torch.device, issue: Callable[[], None]) -> None:
        """Start at once, on this GPU's current stream, the sends and receives that `issue` issues.

        One by one, two ranks that send to each other would wait for each other for ever.
        """
        self._communicator(device)  # it may have to be made, which is no part of a batch
        with self._using:
            self.num_calls += 1
            code = 0
            try:
                self._nccl.check(self._nccl.group_start())
                try:
                    issue()
                finally:
                    code = self._nccl.group_end()
            finally:
                self.num_calls += 1
            self._nccl.check(code)

    def _in_batch(self, tensor: torch.Tensor) -> tuple[_Communicator, int]:
        communicator = self._communicator(tensor.device)
        return communicator, current_stream(communicator.device).cuda_stream

    def _communicator(self, device: torch.device) -> _Communicator:
        index = device.index
        if index not in self._communicators:
            self._connect(lambda attempt: self.open(device, attempt), f"the making of connections between GPUs {index}")
        return self._communicators[index]

    # The end

    def failure(self) -> str | None:
        """Return what went wrong on the network while a collective was under way; None: nothing."""
        if not self._using.acquire(blocking=False):
            return None  # somebody is in a call, or takes the communicator away
        try:
            handles = [each.handle for each in self._communicators.values() if each.handle is not None]
            return next((found for handle in handles if (found := self._nccl.failure(handle)) is not None), None)
        finally:
            self._using.release()

    def abort(self) -> None:
        """End what is under way, at once and by threads; see [Giving up a communicator]."""
        with self._ending:
            given_up, self._given_up = self._given_up, True
        if not given_up:
            for communicator in self._communicators.values():
                self._end(communicator, self._nccl.abort)

    def aborted(self, limit_s: float) -> bool:
        """Wait until all that was to be ended is; False if it takes longer."""
        bound = AwakeClock(limit_s)
        for thread in list(self._endings):
            while thread.is_alive() and not bound.over():
                thread.join(_SLICE_S)
        return not any(thread.is_alive() for thread in self._endings)

    def close(self) -> None:
        """Let go, only when nothing is under way on any rank. NCCL may wait for the others here, for a bounded time."""
        if not self._given_up:
            for communicator in self._communicators.values():
                self._end(communicator, self._nccl.destroy)
            self.aborted(_CLOSING_S)

    def _end(self, communicator: _Communicator, by: Callable[[c_void_p], None]) -> None:
        def run() -> None:
            only_look_on()
            free = self._using.acquire(timeout=_USING_S)  # whoever is in a call may still touch it, or be stuck there
            try:
                if (handle := communicator.take_handle()) is not None:
                    if self._given_up:
                        communicator.spoil()
                    by(handle)
            except RuntimeError:  # NCCL's or CUDA's: there is nobody to tell
                pass
            finally:
                if free:
                    self._using.release()

        with self._ending:
            thread = threading.Thread(target=run, name="gradsync-nccl-end", daemon=True)
            self._endings.append(thread)
        thread.start()


def _handle(communicator: _Communicator) -> c_void_p:
    if communicator.handle is None:
        raise NcclError("this communicator was aborted")
    return communicator.handle
