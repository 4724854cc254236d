"""What the live page's server bears with: nobody holds a connection by doing nothing, and no crowd keeps others out."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from gradsync.report.live import request_limits
from gradsync.report.live.server import Server
from live_server import BOUND_S, Client, grow, serving

WHOLE = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF = b"GET / HTTP/1.1\r\nHost: loc"
SMALL_NBYTES = 4096


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """In a great hurry."""
    monkeypatch.setattr(request_limits, "CLIENT_TIMEOUT_S", 0.2)
    grow(tmp_path / "run", 20)
    with serving(tmp_path / "run") as server:
        yield server


@contextmanager
def connected(server: Server) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", Client(server).port), timeout=BOUND_S) as connection:
        yield connection


def all_said(connection: socket.socket) -> bytes:
    """Until the server closes; a time-out of the socket if it does not."""
    said = b""
    try:
        while piece := connection.recv(1 << 16):
            said += piece
    except ConnectionError:
        pass
    return said


def await_nobody(server: Server) -> None:
    """Until the server holds no connection."""
    deadline = time.monotonic() + BOUND_S
    while server._uvicorn.server_state.connections:
        assert time.monotonic() < deadline, "the server still holds a connection"
        time.sleep(0.01)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"G",
        HALF,
        b"\r\n" * 9,
        b"POST /enter HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nabc",
        b"POST /enter HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n",
        b"POST /enter HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nabc",
    ],
    ids=["nothing", "a letter", "half", "empty lines", "half a body", "half in chunks", "expecting", "body of a GET"],
)
def test_what_is_never_finished_is_closed(server: Server, said: bytes) -> None:
    with connected(server) as connection:
        connection.sendall(said)
        all_said(connection)
    await_nobody(server)


@pytest.mark.parametrize("again", [b"", b"G", HALF, WHOLE, WHOLE + HALF], ids=len)
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "afterwards"])
def test_a_connection_is_for_one_request_whatever_follows(server: Server, again: bytes, at_once: bool) -> None:
    with connected(server) as connection:
        connection.sendall(WHOLE + again if at_once else WHOLE)
        first = connection.recv(12)
        if not at_once:
            with suppress(ConnectionError):  # closed already
                connection.sendall(again)
        said = first + all_said(connection)
    assert said.startswith(b"HTTP/1.1 200")
    assert said.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    "begun", [b"GET / HTTP/1.1\r\nX: ", b"POST /enter HTTP/1.1\r\nHost: localhost\r\nContent-Length: "]
)
def test_drips_count_as_nothing(server: Server, begun: bytes) -> None:
    with connected(server) as connection:
        connection.sendall(begun + (b"250\r\n\r\n" if b"POST" in begun else b""))
        deadline = time.monotonic() + BOUND_S
        try:
            while not select.select([connection], [], [], 0.02)[0]:
                assert time.monotonic() < deadline, "drips keep a connection open"
                connection.sendall(b"x")
        except ConnectionError:
            pass
    await_nobody(server)


def test_who_does_not_read_is_cut_off(server: Server) -> None:
    client = Client(server)
    client.enter()
    # Small buffers, so that an answer does not fit; connections inherit the listener's.
    server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_NBYTES)
    for path in ("/", "/events", "/watch.js"):
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_NBYTES)
            deaf.settimeout(BOUND_S)
            deaf.connect(("127.0.0.1", client.port))
            deaf.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nCookie: {client.cookie}\r\n\r\n".encode())
            assert deaf.recv(1)  # it has begun
            await_nobody(server)


def test_a_crowd_that_says_nothing_keeps_nobody_out(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_limits, "CLIENT_TIMEOUT_S", 2 * BOUND_S)
    with ExitStack() as crowd:
        for said in (b"", HALF, WHOLE + HALF, b"POST /enter HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"):
            for _ in range(request_limits.MAX_UNFINISHED_REQUESTS + 8):
                each = crowd.enter_context(connected(server))
                with suppress(ConnectionError):
                    each.sendall(said)
            client = Client(server)
            client.enter()
            assert client.ask().status == 200
            with client.events() as events:
                next(events)
        assert len(server._uvicorn.server_state.connections) <= request_limits.MAX_UNFINISHED_REQUESTS + 1


def test_there_is_a_limit_on_streams(server: Server) -> None:
    client = Client(server)
    client.enter()
    with ExitStack() as streams:
        for _ in range(80):
            connection = streams.enter_context(connected(server))
            connection.sendall(f"GET /events HTTP/1.1\r\nHost: localhost\r\nCookie: {client.cookie}\r\n\r\n".encode())
            if connection.recv(12) == b"HTTP/1.1 503":
                return
    pytest.fail("80 streams at once")


def test_a_host_that_is_gone_without_a_word_is_noticed(server: Server) -> None:
    assert server._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


def test_the_page_promises_what_is_kept() -> None:
    page = " ".join((Path(__file__).parents[3] / "docs" / "watch.md").read_text().split())
    assert f"at most 16 KiB and {request_limits.CLIENT_TIMEOUT_S:g} seconds" in page
    assert f"that nobody reads for {request_limits.CLIENT_TIMEOUT_S:g} seconds is cut" in page
