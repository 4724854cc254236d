"""Connections are made by a thread of their own, so that whoever waits for them can look after the peers.

Gloo's constructor waits in C: for the addresses of the others in the store, for up to the group's timeout, then for
each of them to connect, for up to 30 s of its own. It looks after nobody there, and Ctrl-C is not heard; a call
to a store whose host is stopped does not return at all. So none of this is done by the thread that trains.

    attempt   ├─ records ─┼─ addresses ─┼─ connections ─┤      in a thread: store calls and constructors
    caller    ├─ slice ─┼─ slice ─┼─ slice ─┼─ …             as any wait, see [Waiting] in `waiting`

Note [Ending a constructor]
    After the caller gave up, the thread must end too. Before the addresses are there it waits in our own
    `PolledStore`, which then raises. After that it may wait for a rank that died before it connected: its place is
    taken by connections of our own to the port on which the constructor listens, each with the number of a pair; they
    end at once, and so does the constructor. What is left then ends with gloo's own 30 s.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from torch._C._distributed_c10d import Store

from gradsync.errors import GradSyncError
from gradsync.transport.pending import Promise
from gradsync.transport.sockets import listeners

T = TypeVar("T")

_FIRST_PAUSE_S, _LAST_PAUSE_S = 5e-4, 0.01
_QUICK_RANKS, _SLICE_S = 64, 0.1
_LEAVING_S = 2.0
_NUMBER = struct.Struct("<q")  # what a connection of gloo says first: the pair it belongs to


class Connect(Protocol):
    """Runs `make(attempt)` in a thread and waits for it; `what` is how an error names it."""

    def __call__(self, make: Callable[[Attempt[T]], T], what: str) -> T: ...


class AttemptCancelled(RuntimeError):
    """The caller waits no more."""


class Attempt(Promise, Generic[T]):
    """`make(attempt)` in a thread; whoever waits too long for it calls `give_up`."""

    def __init__(self, make: Callable[[Attempt[T]], T], what: str, ranks: int = 1) -> None:
        """`ranks` make the same attempt, and ask the same store."""
        super().__init__(what, 0, -1)
        self._many = max(1.0, ranks / _QUICK_RANKS)
        self._make = make
        self._made: list[T] = []
        self._given_up = False
        self._others: frozenset[tuple[str, int]] | None = None  # who listened before the constructor that runs
        self._num_pairs = 0
        self._break_off: Callable[[], None] = _do_nothing
        self._thread = threading.Thread(target=self._run, name="gradsync-connect", daemon=True)

    def start(self) -> None:
        """Begin; whoever calls this calls `give_up` on any error, Ctrl-C in this very line too."""
        self._thread.start()

    def end_by(self, break_off: Callable[[], None]) -> None:
        """Set what else ends a wait in C."""
        self._break_off = break_off

    def check(self) -> None:
        """Raise in the thread when nobody waits for it any more."""
        if self._given_up:
            raise AttemptCancelled("whoever asked for these connections has given up")

    def pauses(self, each_slice: Callable[[], object] = lambda: None) -> Callable[[], None]:
        """Something to call between two looks at a store: it sleeps, longer and longer up to 10 ms.

        Where more than 64 ranks look it sleeps longer, so that all together ask as often as 64 do; `each_slice` is
        called several times a second nevertheless.
        """
        pause, last = _FIRST_PAUSE_S * self._many, _LAST_PAUSE_S * self._many

        def wait() -> None:
            nonlocal pause
            left = pause
            while left > 0:
                self.check()
                each_slice()
                time.sleep(min(left, _SLICE_S))
                left -= _SLICE_S
            pause = min(1.5 * pause, last)

        return wait

    @contextlib.contextmanager
    def constructing(self, size: int) -> Iterator[None]:
        """Note that a constructor among so many ranks runs in the thread, until it ends."""
        self._num_pairs, self._others = size, listeners()
        try:
            yield
        finally:
            self._others = None

    def give_up(self) -> None:
        """End the attempt, whatever the thread waits for: see [Ending a constructor]."""
        self._given_up = True
        if not self.landed(2 * _LAST_PAUSE_S):
            self._break_off()
            others = self._others  # read once: the thread takes it back when its constructor ends
            if others is not None:
                _knock(listeners() - others, self._num_pairs)
        if self._thread.ident is not None:
            self._thread.join(_LEAVING_S)

    def settle(self) -> None:
        """Raise what the transport reported; what we found out ourselves is for `result`."""
        self._thread.join()
        if self._error is not None and not isinstance(self._error, GradSyncError):
            raise self._error

    def result(self) -> T:
        """Return what was made."""
        if self._error is not None:
            raise self._error
        return self._made.pop()

    def _run(self) -> None:
        error: Exception | None = None
        try:
            self._made.append(self._make(self))
        except Exception as failure:
            error = failure
        self._make = _nothing  # what it holds is free now
        self.finish(error)


class PolledStore(Store):
    """A store that is asked again and again instead of waited in, until the attempt is given up."""

    def __init__(self, inner: Store, attempt: Attempt[Any]) -> None:
        super().__init__()
        self._inner = inner
        self._attempt = attempt

    def set(self, key: str, value: Any) -> None:
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._inner.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._inner.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)

    def wait(self, keys: list[str], *_: Any) -> None:
        pause = self._attempt.pauses()
        while not self._inner.check(keys):
            pause()


def _knock(addresses: frozenset[tuple[str, int]], num_pairs: int) -> None:
    for address in addresses:
        for number in range(num_pairs + 1):
            with contextlib.suppress(OSError), socket.create_connection(address, timeout=0.5) as wire:
                wire.sendall(_NUMBER.pack(number))


def _nothing(_: Any) -> Any: ...


def _do_nothing() -> None: ...
