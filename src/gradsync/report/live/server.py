"""The server of `gradsync watch`: a page, its script, and a stream of what changed. It only reads.

GET  /            the page, or for strangers a door that asks for the token
GET  /watch.js    the page's script
POST /enter       the token, for a session
GET  /events      server-sent events: parts of the page that changed
GET  /metrics     for Prometheus, which shows the token as a bearer
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from gradsync.errors import GradSyncError
from gradsync.report.live import request_limits
from gradsync.report.live.access import LOOPBACK, AccessCheck, AccessToken
from gradsync.report.live.feed import Feed
from gradsync.report.page import SCRIPT, document

_MOST_TOKEN = 256  # bytes
_MOST_HEAD = 16 << 10  # bytes of a request's head
_MOST_KNOWN = 32  # connections that were answered: streams of events, in the main
_GONE_S = 30.0  # without an acknowledgement
_LOOK_S = 1.0
_TICK = 10  # looks after which something is sent even if nothing changed: a dead connection is noticed

_METRICS = "text/plain; version=0.0.4"

_SCRIPT = files("gradsync.report.live").joinpath("watch.js").read_text("utf-8")
_LOGIN_PAGE = (
    "<header><b>gradsync</b></header><main><h1>This page needs its token</h1><section>"
    '<p id="door">Open the address that <code>gradsync watch</code> printed: it ends in #token=…</p></section></main>'
)


class Server:
    """One folder's page on one address."""

    def __init__(self, folder: Path, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        """OSError if the address is not ours or taken. `token`: None for a random one."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=request_limits.MAX_UNFINISHED_REQUESTS)
        # A host that is gone without a word is noticed by what it does not acknowledge; connections inherit this.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * _GONE_S))
        self._token = AccessToken(token)
        self._closing = asyncio.Event()
        self._feed = Feed(folder)
        everywhere = host in ("0.0.0.0", "::")
        names = LOOPBACK | {host.lower()} | ({socket.gethostname().lower()} if everywhere else set())
        config: dict[str, Any] = {
            "http": request_limits.TimedConnection,
            "ws": "none",
            "lifespan": "off",
            "log_level": "error",
        }
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                AccessCheck(self._routes(), names, everywhere),
                limit_concurrency=request_limits.MAX_UNFINISHED_REQUESTS + _MOST_KNOWN,
                h11_max_incomplete_event_size=_MOST_HEAD,
                timeout_graceful_shutdown=2,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                **config,
            )
        )
        shown = socket.gethostname() if everywhere else f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self._socket.getsockname()[1]}/"

    @property
    def url(self) -> str:
        """The address with the token behind #, which browsers keep to themselves: it is in no log and no Referer."""
        return f"{self.address}#token={self._token.token}"

    def run(self) -> None:
        """Serve until Ctrl-C or `stop`."""
        with self._socket:
            asyncio.run(self._serve())

    def stop(self) -> None:
        """Stop the server, from any thread."""
        self._uvicorn.should_exit = True

    async def _serve(self) -> None:
        # One reader is enough: the feed looks once for all who watch.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1, "gradsync-watch"))
        watcher = asyncio.create_task(self._watch_exit())
        try:
            await self._uvicorn.serve(sockets=[self._socket])
        finally:
            watcher.cancel()
        # After Ctrl-C it raises the signal once more, which cancels this task: let it, so that the exit code says so.
        await asyncio.sleep(0)

    async def _watch_exit(self) -> None:
        """Streams end when the server does, or it would wait for them."""
        while not self._uvicorn.should_exit:
            await asyncio.sleep(0.1)
        self._closing.set()

    def _routes(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/", self._page),
                Route("/watch.js", self._script),
                Route("/enter", self._enter, methods=["POST"]),
                Route("/events", self._events),
                Route("/metrics", self._metrics),
            ],
            exception_handlers={ValueError: _no_trace},
        )

    async def _page(self, request: Request) -> Response:
        if not self._token.has_session(request.headers):
            return HTMLResponse(document("gradsync", _LOGIN_PAGE, SCRIPT))
        return HTMLResponse(await self._feed.page())

    async def _script(self, _: Request) -> Response:
        return Response(_SCRIPT, media_type="text/javascript")

    async def _enter(self, request: Request) -> Response:
        try:
            token = await asyncio.wait_for(_body(request), request_limits.CLIENT_TIMEOUT_S)
        except (TimeoutError, ClientDisconnect):
            return PlainTextResponse("That took too long.\n", 408)
        if token is None or not self._token.matches(token):
            return PlainTextResponse("That is not the token.\n", 401)
        return Response(status_code=204, headers={"Set-Cookie": self._token.cookie()})

    async def _metrics(self, request: Request) -> Response:
        if not (self._token.is_bearer(request.headers) or self._token.has_session(request.headers)):
            return PlainTextResponse("The token comes first: Authorization: Bearer …\n", 401)
        await self._feed.refresh()
        try:
            return Response(self._feed.metrics(), media_type=_METRICS)
        except GradSyncError as error:  # prometheus-client is not installed
            return PlainTextResponse(f"{error}\n", 501)

    async def _events(self, request: Request) -> Response:
        if not self._token.has_session(request.headers):
            return PlainTextResponse("The token comes first.\n", 401)
        await self._feed.refresh()  # before the answer has begun: what is wrong can still be said
        seen = request.headers.get("last-event-id") or request.query_params.get("since", "")
        stream = self._stream(int(seen) if seen.isascii() and seen.isdigit() and len(seen) < 16 else 0)
        return StreamingResponse(stream, media_type="text/event-stream")

    async def _stream(self, seen: int) -> AsyncIterator[str]:
        yield "retry: 2000\n\n"
        seen = seen if seen <= self._feed.version else 0
        silent = 0
        while not self._closing.is_set():
            await self._feed.refresh()
            silent += 1
            if self._feed.version != seen:
                parts, seen, silent = self._feed.since(seen), self._feed.version, 0
                yield f"event: parts\nid: {seen}\ndata: {json.dumps(parts)}\n\n"
            elif silent >= _TICK:
                silent = 0
                yield "event: tick\ndata:\n\n"
            await _within(self._closing, _LOOK_S)


async def _no_trace(_: Request, error: Exception) -> Response:
    """The folder was there when the server began, and is not any more."""
    return PlainTextResponse(f"{error}\n", 503)


async def _body(request: Request) -> bytes | None:
    """The body of a request; None if it is longer than any token."""
    found = b""
    async for piece in request.stream():
        found += piece
        if len(found) > _MOST_TOKEN:
            return None
    return found


async def _within(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return
