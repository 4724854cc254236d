"""The page: what its owner wrote is read whole, by who knows the nonce, also after the owner's death."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.transport.heartbeat import (
    INITIAL,
    MAX_NOTE_NBYTES,
    RECORD_NBYTES,
    Heartbeat,
    OwnHeartbeat,
    Phase,
    RankState,
    decode,
    encode,
)

STATES = st.builds(
    RankState,
    st.integers(0, 2**64 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from(Phase),
    st.integers(-1, 2**31 - 1),
    st.lists(st.integers(0, 2**31 - 1), max_size=64).map(tuple),
)


@pytest.fixture
def page() -> Iterator[Heartbeat]:
    page = OwnHeartbeat()
    yield page
    page.close()


def reader(page: Heartbeat) -> Heartbeat:
    seen = Heartbeat.open(os.getpid(), page.fd, page.nonce)
    assert seen is not None
    return seen


@given(STATES, st.integers(0, 2**64 - 1))
def test_a_record_carries_every_state(state: RankState, number: int) -> None:
    assert decode(encode(state, number)) == (number, state)


@given(st.binary(max_size=2 * RECORD_NBYTES) | st.binary(min_size=RECORD_NBYTES, max_size=RECORD_NBYTES))
def test_what_is_no_record_is_refused(record: bytes) -> None:
    assert decode(record) is None


@given(STATES, st.integers(0, RECORD_NBYTES - 1))
def test_a_damaged_record_is_refused(state: RankState, at: int) -> None:
    record = bytearray(encode(state))
    record[at] ^= 1
    assert decode(bytes(record)) is None


def test_culprits_beyond_the_record_are_left_out() -> None:
    found = decode(encode(RankState(0, 0, Phase.FAILED, -1, tuple(range(100)))))
    assert found is not None
    assert found[1].culprits == tuple(range(64))


def test_a_new_page_says_that_its_owner_computes(page: Heartbeat) -> None:
    seen = reader(page)
    assert seen.read() == INITIAL
    seen.close()


def test_half_a_write_is_never_seen(page: Heartbeat) -> None:
    before, after = RankState(1, 1, Phase.BACKWARD, 1, ()), RankState(2, 2, Phase.LOST_PEER, -1, (3,))
    seen = reader(page)
    page.write(before)
    whole = bytes(page._memory[:])
    page.write(after)
    new = bytes(page._memory[:])
    for cut in range(len(new)):
        # The owner was killed after `cut` bytes.
        page._memory[:] = new[:cut] + whole[cut:]
        assert seen.read() in (before, after)
    assert seen.read() == after
    seen.close()


def test_a_reader_beside_a_writer_sees_only_what_was_written(page: Heartbeat) -> None:
    seen = reader(page)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number = (number + 1) % 64
            page.write(RankState(number, number, Phase.FAILED, number, (number,) * number))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(20_000):
            state = seen.read()
            assert state == INITIAL or state == RankState(
                state.beat, state.beat, Phase.FAILED, state.beat, (state.beat,) * state.beat
            )
    finally:
        stop.set()
        writer.join()
        seen.close()


@given(st.lists(st.binary(max_size=MAX_NOTE_NBYTES), min_size=1, max_size=5))
def test_the_board_shows_the_last_note(texts: list[bytes]) -> None:
    page = OwnHeartbeat()
    seen = reader(page)
    assert seen.read_note() == (0, b"")
    for number, text in enumerate(texts, start=1):
        page.leave_note(text)
        page.at(number, Phase.BACKWARD)  # apart from the state
        assert seen.read_note() == (number, text)
        assert seen.read().step == number
    seen.close()
    page.close()
    page.leave_note(b"too late, but no error")


def test_half_a_note_is_never_seen(page: Heartbeat) -> None:
    assert isinstance(page, OwnHeartbeat)
    seen = reader(page)
    page.leave_note(b"before" * 9)
    whole = bytes(page._memory[:])
    page.leave_note(b"after" * 9)
    new = bytes(page._memory[:])
    for cut in range(1000, len(new)):
        page._memory[:] = new[:cut] + whole[cut:]
        assert seen.read_note() in ((1, b"before" * 9), (2, b"after" * 9))
    assert seen.read_note() == (2, b"after" * 9)
    seen.close()


def test_a_page_survives_its_owner() -> None:
    module = importlib.util.find_spec("gradsync.transport.heartbeat")
    assert module is not None
    script = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("page", {module.origin!r})
sys.modules["page"] = page = importlib.util.module_from_spec(spec)
spec.loader.exec_module(page)
own = page.OwnHeartbeat()
own.write(page.RankState(7, 41, page.Phase.FAILED, 3, (2,)))
print(own.fd, own.nonce.hex(), flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        fd, nonce = owner.stdout.readline().split()
        seen = Heartbeat.open(owner.pid, int(fd), bytes.fromhex(nonce))
        owner.kill()
    assert seen is not None
    assert seen.read() == RankState(7, 41, Phase.FAILED, 3, (2,))
    seen.close()


def test_a_stranger_is_refused(page: Heartbeat) -> None:
    descriptors = os.listdir("/proc/self/fd")
    assert Heartbeat.open(os.getpid(), page.fd, bytes(16)) is None  # another nonce
    assert Heartbeat.open(os.getpid(), 10**6, page.nonce) is None  # no such descriptor
    assert Heartbeat.open(2**22 - 1, page.fd, page.nonce) is None  # no such process
    with open(__file__) as file:
        assert Heartbeat.open(os.getpid(), file.fileno(), page.nonce) is None  # no page
    assert os.listdir("/proc/self/fd") == descriptors
