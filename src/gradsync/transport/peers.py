"""How to see one peer of this host: by its page, and by a pidfd that tells of its death at once.

A peer is anything with `look()`, `dead()`, `listen()`, `silent_s` and `close()`; `liveness` watches a set of
them. Peers on other hosts are in `mailbox`.
"""

from __future__ import annotations

import os
import select
from typing import Protocol

from gradsync.transport.page import Page, State
from gradsync.transport.processes import look_at


class Peer(Protocol):
    """A view of another rank."""

    @property
    def silent_s(self) -> float:
        """Seconds without a beat, of those in which this process itself was awake."""

    def look(self) -> State:
        """What it last said of itself."""

    def runs(self) -> bool:
        """Whether its process is known to run though it is silent: see [Late is not dead] in `liveness`."""

    def dead(self) -> bool:
        """Whether it is known to have ended; False also means: cannot tell."""

    def listen(self, elapsed_s: float) -> None:
        """Called after every tick of our own, with how long it took."""

    def close(self) -> None: ...


class LocalPeer:
    """A rank of this host."""

    def __init__(self, pid: int, page: Page, pidfd: int) -> None:
        self.pid = pid
        self.silent_s = 0.0
        self._page = page
        self.pidfd = pidfd
        self._beat = -1

    @classmethod
    def find(cls, pid: int, fd: int, nonce: bytes) -> LocalPeer | None:
        page = Page.open(pid, fd, nonce)
        if page is None:
            return None
        try:
            return cls(pid, page, os.pidfd_open(pid))
        except OSError:
            page.close()
            return None

    def look(self) -> State:
        return self._page.read()

    def runs(self) -> bool:
        process = look_at(self.pid)
        return process is not None and not process.ended and not process.stopped and not self.dead()

    def dead(self) -> bool:
        # A poll object of its own each time: one that two threads share raises.
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def listen(self, elapsed_s: float) -> None:
        beat = self.look().beat
        self.silent_s = self.silent_s + elapsed_s if beat == self._beat else 0.0
        self._beat = beat

    def close(self) -> None:
        self._page.close()
        os.close(self.pidfd)
