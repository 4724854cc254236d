"""Connections are made by a thread: who gives up leaves none behind, wherever it was waiting."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import FileStore, PrefixStore, ProcessGroupGloo, Store

from gradsync.transport import connecting
from gradsync.transport.connecting import Attempt, AttemptCancelled, PolledStore
from gradsync.transport.gloo_channel import GlooChannel

LIMIT = timedelta(seconds=60)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return PrefixStore("group", FileStore(str(tmp_path / "store"), 2))


class Watched(PolledStore):
    """A store that tells when the address of rank 1 was handed over, or never hands over that of rank 0."""

    def __init__(self, inner: Store, attempt: Attempt[GlooChannel], keeps_back: bool) -> None:
        super().__init__(inner, attempt)
        self.handed_over = threading.Event()
        self._keeps_back = keeps_back

    def wait(self, keys: list[str], *_: Any) -> None:
        super().wait([f"{keys[0]}/never"] if self._keeps_back else keys)

    def get(self, key: str) -> bytes:
        if key.endswith("1"):
            self.handed_over.set()
        return super().get(key)


def constructor(store: Store, rank: int, keeps_back: bool) -> tuple[Attempt[GlooChannel], threading.Event]:
    """Of one of two ranks, begun in a thread; and what happens when it has the address of rank 1."""
    attempt: Attempt[GlooChannel] = Attempt(lambda it: make(it), "the making of connections")
    watched = Watched(store, attempt, keeps_back)

    def make(it: Attempt[GlooChannel]) -> GlooChannel:
        with it.constructing(2):
            return GlooChannel(ProcessGroupGloo(watched, rank, 2, LIMIT), keeps=watched)

    attempt.start()
    return attempt, watched.handed_over


def give_up(attempt: Attempt[GlooChannel]) -> None:
    attempt.give_up()
    assert attempt.landed(0)
    assert not attempt._thread.is_alive()


def test_what_a_thread_made_is_handed_over() -> None:
    attempt = Attempt(lambda _: 7, "something")
    attempt.start()
    attempt.settle()
    assert attempt.result() == 7


def test_a_constructor_that_waits_for_an_address_ends(store: Store) -> None:
    attempt, _ = constructor(store, 0, keeps_back=False)
    give_up(attempt)
    with pytest.raises(AttemptCancelled):
        attempt.result()


def test_a_constructor_that_waits_for_a_connection_ends(tmp_path: Path) -> None:
    """Rank 1 has told where it is, and goes no further. Which of the two connects is up to their ports."""
    for trial in range(6):
        store = FileStore(str(tmp_path / f"store-{trial}"), 2)
        other, _ = constructor(store, 1, keeps_back=True)
        attempt, handed_over = constructor(store, 0, keeps_back=False)
        assert handed_over.wait(30)
        give_up(attempt)
        give_up(other)


def test_an_attempt_that_never_began_can_be_given_up() -> None:
    attempt: Attempt[int] = Attempt(lambda _: 7, "something")
    attempt.give_up()
    assert not attempt._thread.is_alive()


def test_a_constructor_may_end_while_it_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Just when the sockets that listen are looked at: whose they were is known no more."""
    begun, ends, ended = threading.Event(), threading.Event(), threading.Event()

    def make(it: Attempt[None]) -> None:
        with it.constructing(2):
            begun.set()
            assert ends.wait(10)
        ended.set()
        it.check()

    attempt = Attempt(make, "the making of connections")
    attempt.start()
    assert begun.wait(10)

    def look() -> frozenset[tuple[str, int]]:
        ends.set()
        assert ended.wait(10)
        return frozenset()

    monkeypatch.setattr(connecting, "listeners", look)
    attempt.give_up()
    assert attempt.landed(0)
    with pytest.raises(AttemptCancelled):
        attempt.result()
