"""How to see one peer: on the same host by its page and pid, elsewhere by what it writes to the store.

A peer is anything with `look()`, `dead()` and `close()`; `liveness` watches a set of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from gradsync.transport.page import Page, Phase, State

_PERIOD_S = 0.5


class Peer(Protocol):
    """A view of another rank."""

    def look(self) -> State:
        """What it last said of itself."""

    def dead(self) -> bool:
        """Whether it is known to have ended; False also means: cannot tell."""

    def close(self) -> None: ...


class LocalPeer:
    """A rank of this host: its page, and a pidfd that tells of its death at once."""

    def __init__(self, pid: int, page: Page, pidfd: int) -> None:
        self.pid = pid
        self._page = page
        self._pidfd = pidfd
        self._poll = select.poll()
        self._poll.register(pidfd, select.POLLIN)

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

    def dead(self) -> bool:
        return bool(self._poll.poll(0))

    def close(self) -> None:
        self._page.close()
        os.close(self._pidfd)


class RemotePeer:
    """A rank of another host, as the mailbox last saw it."""

    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        self._mailbox = mailbox
        self._rank = rank

    def look(self) -> State:
        return self._mailbox.states[self._rank]

    def dead(self) -> bool:
        return False

    def close(self) -> None:
        pass


class Mailbox:
    """Our state written to, and remote peers' read from, the rendezvous store, by a thread of its own.

    Store calls may block far beyond their timeouts when the store's host is gone, so no other thread ever
    makes one: a stuck mailbox only means that remote peers look silent, which is what they are.
    """

    def __init__(self, store: Store, prefix: str, rank: int, remote: list[int], own: Page) -> None:
        self.states: dict[int, State] = dict.fromkeys(remote, State(0, 0, Phase.COMPUTING, -1, ()))
        self.curious = threading.Event()  # read the peers, not only write ourselves
        # A connection of its own: a call that blocks must not hold up the user's store.
        own_connection = store.clone()  # type: ignore[attr-defined]  # missing in the stubs
        self._store = PrefixStore(prefix, own_connection)
        self._store.set_timeout(timedelta(seconds=5))
        self._rank = rank
        self._own = own
        self._stop = threading.Event()
        self._post()
        self._thread = threading.Thread(target=self._run, name="gradsync-mailbox", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(2)

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            # A store that fails is tried again: until it answers, the peers behind it are silent.
            with contextlib.suppress(dist.DistError, RuntimeError):
                self._post()
                if self.curious.is_set():
                    self._fetch()

    def _post(self) -> None:
        self._store.set(str(self._rank), json.dumps(self._own.read()))

    def _fetch(self) -> None:
        for rank in self.states:
            self.states[rank] = _parse(self._store.get(str(rank)))


def _parse(text: bytes) -> State:
    beat, step, phase, bucket, culprits = json.loads(text)
    return State(int(beat), int(step), Phase(phase), int(bucket), tuple(int(rank) for rank in culprits))


Peers = Mapping[int, Peer]
