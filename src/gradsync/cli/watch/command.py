"""`gradsync watch`: a run's report while it runs, as a page on this machine or in the terminal."""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from gradsync import files, units
from gradsync.cli.shared import BadInput, Parser, spoken, whole_number
from gradsync.cli.watch.terminal import watch
from gradsync.report.live.feed import FeedReader, FeedUpdate
from gradsync.report.wording import printable
from gradsync.transport.awake_clock import AwakeClock
from gradsync.units import show_seconds

_LOOK_S = 0.5
_TOKEN = re.compile(r"[A-Za-z0-9_-]{16,128}")

_TOKEN_NBYTES = 1024

_DESCRIPTION = """\
Follows the folder that a run writes (gs.attach(..., trace=folder), gs.observe(ddp, trace=folder) or
GRADSYNC_TRACE=folder) and shows what gradsync report shows, as it happens. It only reads. The page is for this machine
alone and needs the token in its address; for another machine, forward the port: ssh -L 8000:127.0.0.1:8000 host.
"""

_EXAMPLE = """\
example:
  gradsync watch run/                      prints an address to open in a browser
  gradsync watch run/ --port 8000          always the same port, to forward it over ssh
  gradsync watch run/ --terminal           in this terminal, until the run ends
"""


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    """Put `watch` among the commands."""
    parser = commands.add_parser(
        "watch", help="follow a run live, in a browser or in the terminal", description=_DESCRIPTION, epilog=_EXAMPLE
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="RUN", help="the folder of the run; it need not exist yet")
    add("--terminal", action="store_true", help="show it here instead of on a page")
    add("--port", type=whole_number(0, 65535), metavar="N", help="of the page (any that is free)")
    add("--host", metavar="ADDRESS", help="listen on another address than 127.0.0.1; not encrypted")
    add("--token-file", type=Path, metavar="FILE", help="take the token from there, not a random one (for Prometheus)")
    add("--patience", type=spoken(units.seconds), default=600.0, metavar="TIME", help="to wait for a run (10min)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The command."""
    if options.terminal:
        if (options.port, options.host, options.token_file) != (None, None, None):
            raise BadInput(
                "gradsync watch: --port, --host and --token-file are of the page: leave them out, or --terminal"
            )
        reader, update = await_run(options.folder, options.patience)
        watch(reader, update, Console(highlight=False))
        return 0
    return _serve(options)


def _serve(options: argparse.Namespace) -> int:
    try:
        from gradsync.report.live.server import Server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        raise BadInput(
            f"gradsync watch: the page needs {error.name}, which is not installed: pip install 'gradsync[report]', "
            "or use --terminal"
        ) from None
    host = "127.0.0.1" if options.host is None else options.host
    port = 0 if options.port is None else options.port
    token = None if options.token_file is None else _read_token(options.token_file)
    await_run(options.folder, options.patience)
    try:
        server = Server(options.folder, host, port, token)
    except OSError as error:
        raise BadInput(
            f"gradsync watch: cannot listen on {host} port {port}: {error.strerror}; name another --port, or an "
            "address of this machine as --host"
        ) from None
    if not _is_loopback(host):
        print(f"Listening on {host}: what it shows crosses the network unencrypted.", file=sys.stderr)
    print(f"Open {server.url}", flush=True)
    print("It follows the run until Ctrl-C.", file=sys.stderr, flush=True)
    server.run()
    return 0


def _read_token(path: Path) -> str:
    """The token in a file that only its owner can read."""
    try:
        with files.open_to_read(path) as file:
            mode, token = os.fstat(file.fileno()).st_mode, file.read(_TOKEN_NBYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it holds other letters than those of ASCII"
        raise BadInput(f"gradsync watch: --token-file {path} cannot be read: {why}") from None
    if mode & 0o077:
        raise BadInput(f"gradsync watch: --token-file {path} can be read by others: chmod 600 {path}")
    if _TOKEN.fullmatch(token) is None:
        raise BadInput(
            f"gradsync watch: --token-file {path} must hold 16 to 128 letters, digits, - or _; make one with: "
            f"python -c 'import secrets; print(secrets.token_urlsafe(24))' > {path}"
        )
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def await_run(
    folder: Path, patience_s: float, sleep: Callable[[float], None] = time.sleep
) -> tuple[FeedReader, FeedUpdate]:
    """A reader of the run, and its first news; `BadInput` if none begins in time."""
    reader = FeedReader(folder)
    said = False
    bound = AwakeClock(patience_s)
    while True:
        try:
            return reader, reader.look()
        except ValueError as error:
            if folder.exists() and not folder.is_dir():
                raise BadInput(f"gradsync watch: {error}") from None
            if bound.over():
                waited = f" (waited {show_seconds(patience_s)} for it: --patience)" if patience_s else ""
                raise BadInput(f"gradsync watch: {error}{waited}") from None
        if not said:
            print(f"Waiting for a run to begin in {printable(str(folder))} ...", file=sys.stderr, flush=True)
            said = True
        sleep(_LOOK_S)
