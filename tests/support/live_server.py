"""A server of `gradsync watch` in a thread, and a client that says exactly what a test wants to say."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from gradsync.report.live.server import Server
from gradsync.trace.json_lines import to_json
from made_runs import made_run

BOUND_S = 30.0


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """While the block runs; nothing is left behind."""
    server = Server(folder)
    thread = threading.Thread(target=server.run, name="watch-server")
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(BOUND_S)
        assert not thread.is_alive()


class Served(Protocol):
    """Where a client goes."""

    address: str

    @property
    def url(self) -> str: ...


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    text: str


@dataclass
class Client:
    """Requests one at a time, on a connection each."""

    server: Served
    cookie: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def port(self) -> int:
        return urlsplit(self.server.address).port or 0

    def ask(self, path: str = "/", method: str = "GET", body: str | None = None, **headers: str) -> Answer:
        connection = self._connection()
        try:
            connection.request(method, path, body, self._headers(headers))
            answer = connection.getresponse()
            lower = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, lower, answer.read().decode("utf-8"))
        finally:
            connection.close()

    def enter(self) -> Answer:
        answer = self.ask("/enter", "POST", self.server.url.partition("#token=")[2])
        self.cookie = answer.headers["set-cookie"].partition(";")[0]
        return answer

    @contextmanager
    def events(self, **headers: str) -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
        """(version, parts) of each event that carries some."""
        connection = self._connection()
        try:
            connection.request("GET", "/events", headers=self._headers(headers))
            answer = connection.getresponse()
            assert answer.status == 200
            yield _parts(answer)
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=BOUND_S)

    def _headers(self, more: dict[str, str]) -> dict[str, str]:
        cookie = {"Cookie": self.cookie} if self.cookie else {}
        return {**cookie, **self.headers, **{name.replace("_", "-"): value for name, value in more.items()}}


def _parts(answer: http.client.HTTPResponse) -> Iterator[tuple[str, dict[str, Any]]]:
    fields: dict[str, str] = {}
    while line := answer.readline():
        name, _, value = line.decode("utf-8").rstrip("\n").partition(": ")
        if name:
            fields[name] = value
        elif fields:
            if fields.get("event") == "parts":
                yield fields["id"], json.loads(fields["data"])
            fields = {}


def grow(folder: Path, num_steps: int, made: int = 60, ranks: int = 2) -> None:
    """Let each rank write the steps up to this one that it has not written yet."""
    run = made_run(ranks, made)
    for rank, trace in run.ranks.items():
        path = folder / f"rank-{rank}.jsonl"
        path.parent.mkdir(exist_ok=True)
        done = path.read_text("utf-8").count('"kind":"step"') if path.exists() else 0
        with open(path, "a", encoding="utf-8") as file:
            if not file.tell():
                file.write("".join(f"{to_json(line)}\n" for line in [trace.run, *trace.layouts]))
            file.write("".join(f"{to_json(step)}\n" for step in trace.steps[done:num_steps]))


def finish(folder: Path, step: int) -> None:
    """Every rank says goodbye."""
    for path in folder.glob("rank-*.jsonl"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f'{{"kind":"end","step":{step},"why":"detach"}}\n')
