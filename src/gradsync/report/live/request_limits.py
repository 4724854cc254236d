"""Connections that do not keep others out: one request each, and ten seconds for whatever the client has to do.

    connected ──▶ head ──▶ body ──▶ the server answers ──▶ read ──▶ closed
    └───── 10 s ─────┘└ 10 s ┘      └── not read for 10 s: cut off ──┘

A body is awaited by whoever wants one (`server.py`); other requests are answered without it. Of those whose request
is not whole yet there are so many at most: when another comes, the one that has taken longest is cut off, so that a
crowd that says nothing keeps out nobody who speaks.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_UNFINISHED_REQUESTS = 32
CLIENT_TIMEOUT_S = 10.0


class TimedConnection(H11Protocol):
    """One connection."""

    _deadline: asyncio.TimerHandle | None = None
    _came = 0.0

    @property
    def is_asking(self) -> bool:
        """True while the request of this connection is not whole."""
        return self.cycle is None or (self.cycle.more_body and not self.cycle.response_complete)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # whatever the client does not take at once is waited for
        self._came = self.loop.time()
        self._start_timeout()
        asking = [
            each
            for each in self.connections
            if isinstance(each, TimedConnection) and each.is_asking and not each.transport.is_closing()
        ]
        if len(asking) > MAX_UNFINISHED_REQUESTS:
            min(asking, key=lambda each: each._came).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timeout()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        asking = self.cycle is None
        super().handle_events()
        if asking and self.cycle is not None and not self.cycle.response_complete:
            self._stop_timeout()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._start_timeout()  # what was written has to be read

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_timeout()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timeout()

    def _start_timeout(self) -> None:
        self._stop_timeout()
        self._deadline = self.loop.call_later(CLIENT_TIMEOUT_S, self.transport.abort)

    def _stop_timeout(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
