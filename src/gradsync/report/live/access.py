"""The check of who may come in, made before anything else happens.

Host      must be a name of this machine: a page of another site whose name suddenly points here (DNS rebinding) is not
method    GET, which changes nothing; POST only to show the token
session   the cookie that POST /enter gave for the token: HttpOnly, SameSite=Strict
origin    browsers say where a request comes from (Sec-Fetch-Site): only our own page may ask for events
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gradsync.report.page import style_policy

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class AccessToken:
    """The token of one server, and the session that it opens."""

    def __init__(self, token: str | None = None) -> None:
        self.token = secrets.token_urlsafe(24) if token is None else token
        self._session = secrets.token_urlsafe(24)
        # Cookies do not know ports: two watches on one machine must not overwrite each other's.
        self._cookie = f"gradsync-{secrets.token_hex(4)}"

    def matches(self, token: bytes) -> bool:
        """Return whether the token is right, found in a time that says nothing about how much of it was."""
        return secrets.compare_digest(token, self.token.encode())

    def is_bearer(self, headers: Headers) -> bool:
        """Return whether a program that knows no cookies brings the token itself."""
        kind, _, token = headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and self.matches(token.strip().encode())

    def cookie(self) -> str:
        """The header that opens a session."""
        return f"{self._cookie}={self._session}; Path=/; HttpOnly; SameSite=Strict"

    def has_session(self, headers: Headers) -> bool:
        """Return whether a request belongs to a session."""
        shown = ""
        for cookie in headers.get("cookie", "").split(";"):  # of all servers on this host, in whatever form
            name, _, value = cookie.strip().partition("=")
            if name == self._cookie:
                shown = value
        return secrets.compare_digest(shown.encode(), self._session.encode())


def allowed(host: str, names: Iterable[str], any_address: bool) -> bool:
    """Return whether a Host header names this machine.

    A server on all interfaces (`any_address`) answers to addresses too: no site owns an address.

    >>> allowed("127.0.0.1:8000", LOOPBACK, False), allowed("[::1]:80", LOOPBACK, False)
    (True, True)
    >>> allowed("evil.example:8000", LOOPBACK, True), allowed("10.0.0.2:80", LOOPBACK, True)
    (False, True)
    """
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower() in names:
        return True
    return any_address and _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class AccessCheck:
    """Refuses what must not come in, and puts on every answer what browsers should enforce."""

    def __init__(self, app: ASGIApp, names: frozenset[str], any_address: bool) -> None:
        self._app = app
        self._names = names
        self._any_address = any_address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        refusal = self._refusal(scope["method"], scope["path"], Headers(scope=scope))
        app = self._app if refusal is None else refusal

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await app(scope, receive, guarded)

    def _refusal(self, method: str, path: str, headers: Headers) -> PlainTextResponse | None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not allowed(hosts[0], self._names, self._any_address):
            return PlainTextResponse("This is not the name of this server; see --host.\n", 421)
        if method != ("POST" if path == "/enter" else "GET"):
            return PlainTextResponse("This server only shows things.\n", 405)
        if path != "/" and headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return PlainTextResponse("Only for the page of this server.\n", 403)
        return None


_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src 'self'; connect-src 'self'; {style_policy()}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Connection": "close",  # a second request needs a second connection, with a time limit of its own
}
