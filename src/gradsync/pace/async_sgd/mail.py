"""Messages between the ranks: one receiver thread, and sends that never block.

    training thread ──┐                                   ┌──▶ handle(source, message, payload)
    receiver thread ──┼─▶ send ─▶ peers ─▶ messages ─▶ receiver thread, the only caller of recv
    keeper thread ────┘  ALIVE to both neighbours: no receiver waits as long as the group allows

Note [One receiver]
    Gloo's messages have no completion that one could ask for or be called by, and the first expired
    `wait(timeout)` closes the connection for good. So one thread waits for a message of fixed size from anybody,
    then for its payload from that sender. It is never waited for with a timeout: an ALIVE comes to it before the
    group's own expires. Who is dead is learned elsewhere, from the beats: a receiver that waits for anybody does
    not notice that one of them is gone, and goes on with the others.

Note [Heard]
    A sent tensor must stay alive until it has left. Every message says how many messages its sender has heard from
    us; what those carried is let go.

Note [The last message]
    Nothing but a message ends the wait for anybody, and one that was announced by a rank which then died never comes.
    So who gives up says goodbye, which wakes the others, and is woken by theirs or by an ALIVE. Otherwise it cuts
    its connections: a receiver that is bound to one of them fails, and no other can wake any more. One that woke
    while the interpreter goes would take the process with it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.distributed import Work

from gradsync.pace.async_sgd.messages import (
    MESSAGE_NBYTES,
    REQUEST_TAG,
    MessageKind,
    ShardMessage,
    payload_tag,
    read,
    write,
)
from gradsync.transport.gloo_channel import GlooChannel
from gradsync.transport.sockets import cut

_GRACE_S = 4.0  # for a neighbour's ALIVE or BYE to wake the receiver, and for our own messages to leave

Handler = Callable[[int, ShardMessage, torch.Tensor | None], None]


class Failure(NamedTuple):
    """The failure that ended the receiver: our own handling of a message, or the transport."""

    error: Exception
    ours: bool


class _SentMessage(NamedTuple):
    number: int  # the how-manieth message to this peer
    works: tuple[Work, ...]
    tensors: tuple[torch.Tensor, ...]  # they must outlive the works


class Mail:
    """Sends and receives messages on a channel that nobody else uses."""

    def __init__(
        self, channel: GlooChannel, rank: int, size: int, period_s: float, sockets: set[tuple[int, str]]
    ) -> None:
        self._channel = channel
        self._rank = rank
        self._peers = [peer for peer in range(size) if peer != rank]
        self._period_s = period_s
        self._sockets = sockets  # of the lane's groups: who must cut them needs none of them any more
        self._sending = threading.Lock()  # a message and its payload stay together
        self._written = [0] * size
        self._heard = [0] * size
        self._told = [0] * size  # how much of it the peer knows
        self._sent: list[deque[_SentMessage]] = [deque() for _ in range(size)]
        self._stop = threading.Event()
        self._farewell_said = threading.Event()
        self._abandoned = False
        self._pid = os.getpid()
        self._threads: list[threading.Thread] = []
        self.failure: Failure | None = None

    def start(self, handle: Handler) -> None:
        """Hand every message to `handle` from now on, on the receiver thread."""
        if not self._peers:
            return
        for run, name in (((lambda: self._receive(handle)), "receiver"), (self._keep, "keeper")):
            self._threads.append(threading.Thread(target=run, name=f"gradsync-async-{name}", daemon=True))
            self._threads[-1].start()

    def send(self, to: int, message: ShardMessage, payload: torch.Tensor | None = None) -> None:
        """Start sending; what is sent must not be written afterwards."""
        with self._sending:
            self._post(to, message, payload)

    def _post(self, to: int, message: ShardMessage, payload: torch.Tensor | None = None) -> None:
        nbytes = 0 if payload is None else payload.numel()
        self._told[to] = self._heard[to]
        request = write(message._replace(nbytes=nbytes, heard=self._told[to]))
        works, tensors = [self._channel.send(request, to, REQUEST_TAG)], [request]
        if payload is not None and nbytes:
            works.append(self._channel.send(payload, to, self._tag(message, self._rank, to)))
            tensors.append(payload)
        self._written[to] += 1
        self._sent[to].append(_SentMessage(self._written[to], tuple(works), tuple(tensors)))

    def say_goodbye(self) -> None:
        """Nothing follows from here. The receiver ends when all peers have said so too."""
        with self._sending:
            self._stop.set()  # no ALIVE comes after a farewell: nobody might be there to receive it
        try:
            for peer in self._peers:
                with contextlib.suppress(RuntimeError):  # whoever is gone does not need it
                    self.send(peer, ShardMessage(MessageKind.BYE))
        finally:  # a Ctrl-C here too ends the keeper
            self._farewell_said.set()

    def all_gone(self, slice_s: float) -> bool:
        """Return whether the threads have ended: all said goodbye, and all messages left; wait for at most a slice."""
        for thread in self._threads:
            if thread is not threading.current_thread():  # the garbage collector may run anywhere
                thread.join(slice_s / len(self._threads))
        return not any(thread.is_alive() for thread in self._threads)

    def abandon(self) -> None:
        """End the threads, whatever the others do: see [The last message]."""
        if os.getpid() != self._pid:  # a forked child has the same sockets, and ends without touching them
            return
        self._abandoned = True
        if not self._stop.is_set():
            self.say_goodbye()
        if not self.all_gone(_GRACE_S):
            cut(self._sockets)
            self.all_gone(_GRACE_S)

    # On the threads

    def _receive(self, handle: Handler) -> None:
        there = set(self._peers)
        try:
            while there and not self._abandoned:
                source, message, payload = self._next()
                if message.kind is MessageKind.BYE:
                    there.discard(source)
                elif message.kind is not MessageKind.ALIVE:
                    self._handle(handle, source, message, payload)
        except Exception as error:
            if self.failure is None:
                self.failure = Failure(error, ours=False)

    def _handle(self, handle: Handler, source: int, message: ShardMessage, payload: torch.Tensor | None) -> None:
        try:
            handle(source, message, payload)
        except Exception as error:
            self.failure = Failure(error, ours=True)
            raise

    def _next(self) -> tuple[int, ShardMessage, torch.Tensor | None]:
        request = torch.empty(MESSAGE_NBYTES, dtype=torch.uint8, device="cpu")
        work = self._channel.recv_any(request, REQUEST_TAG)
        work.wait()
        source, message, payload = work._source_rank(), read(request), None
        if message.nbytes:
            payload = torch.empty(message.nbytes, dtype=torch.uint8, device="cpu")
            self._channel.recv(payload, source, self._tag(message, source, self._rank)).wait()
        self._heard[source] += 1
        self._release(source, message.heard)
        return source, message, payload

    def _release(self, peer: int, heard: int) -> None:
        """Let go of what was heard: see [Heard]. A work is waited for once: a second wait of gloo's never ends."""
        while (message := self._pop(peer, heard)) is not None:
            for work in message.works:
                work.wait()

    def _pop(self, peer: int, heard: int) -> _SentMessage | None:
        with self._sending:
            return self._sent[peer].popleft() if self._is_unheard(peer, heard) else None

    def _is_unheard(self, peer: int, number: int) -> bool:
        """Return whether a message up to this one has not been heard yet."""
        sent = self._sent[peer]
        return bool(sent) and sent[0].number <= number

    def _keep(self) -> None:
        """Keep both neighbours in the ring awake, so that each also learns what was heard: see [Heard]."""
        last = {self._peers[self._rank % len(self._peers)]: 0, self._peers[self._rank - 1]: 0}
        while not self._stop.wait(self._period_s):
            for peer, number in last.items():
                with self._sending:
                    stands_still = self._is_unheard(peer, number) and self._told[peer] == self._heard[peer]
                    if stands_still or self._stop.is_set():
                        continue  # another would only wait beside the one before
                    with contextlib.suppress(RuntimeError):  # it is gone: whoever waits learns it from the beats
                        self._post(peer, ShardMessage(MessageKind.ALIVE))
                        last[peer] = self._written[peer]
        self._farewell_said.wait()
        # The last messages must leave while this process lives, and stay alive until then.
        for peer in self._peers:
            with contextlib.suppress(RuntimeError):
                self._release(peer, self._written[peer])

    def _tag(self, message: ShardMessage, source: int, to: int) -> int:
        return payload_tag(message.kind, to if message.kind is MessageKind.PUSH else source, message.version)
