"""The live page's server: who may see what, what it refuses, and that news arrive."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradsync.report.live.access import LOOPBACK, allowed
from gradsync.report.live.server import Server
from hostile_names import HOSTILE, hostile_folder
from live_server import BOUND_S, Client, finish, grow, serving

NAMES = (
    "h1", "h2", "p", "b", "bdi", "span", "small", "ul", "li", "dl", "dt", "dd", "div", "svg", "rect", "line", "path",
    "text", "title", "table", "thead", "tbody", "tr", "th", "td",
)  # fmt: skip
TAGS = {f"<{name}" for name in NAMES} | {f"</{name}" for name in NAMES}


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """For tests that only ask."""
    folder = tmp_path_factory.mktemp("watch") / "run"
    grow(folder, 20)
    with serving(folder) as server:
        first = Client(server)
        first.enter()
        first.ask()  # from now on it has all its threads
        yield server


@pytest.fixture
def client(standing: Server) -> Client:
    return Client(standing)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    grow(tmp_path / "run", 20)
    return tmp_path / "run"


@pytest.fixture
def follower(folder: Path) -> Iterator[Client]:
    """Of a folder that a test may change."""
    with serving(folder) as server:
        yield Client(server)


def test_strangers_see_a_door_and_nothing_of_the_run(client: Client) -> None:
    answer = client.ask()
    assert answer.status == 200
    assert "needs its token" in answer.text
    assert "rank" not in answer.text.partition("<body>")[2]


def test_the_token_opens_a_session_by_a_cookie_that_scripts_cannot_read(client: Client) -> None:
    cookie = client.enter().headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    answer = client.ask()
    assert answer.status == 200
    assert "layers.0.weight" in answer.text
    assert "running, step 20" in answer.text


def test_the_token_is_in_no_answer_and_in_no_cookie(client: Client) -> None:
    token = client.server.url.partition("#token=")[2]
    assert len(token) >= 32
    assert "?" not in client.server.url
    entered = client.enter()
    for answer in (client.ask(), client.ask("/watch.js"), entered):
        assert token not in answer.text
        assert token not in str(answer.headers)


@pytest.mark.parametrize("body", ["", "x", "x" * 32, "x" * 5000, "\x00"])
def test_a_wrong_token_opens_nothing(client: Client, body: str) -> None:
    answer = client.ask("/enter", "POST", body)
    assert answer.status == 401
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("cookie", ["", "gradsync=1", "=", "a=b; c", "\x7f", "x" * 6000])
def test_events_need_the_cookie(client: Client, cookie: str) -> None:
    client.cookie = cookie
    assert client.ask("/events").status == 401
    assert "needs its token" in client.ask("/").text


def test_cookies_of_other_servers_on_this_host_do_no_harm(client: Client) -> None:
    client.enter()
    client.cookie = f'odd={{"a": [1, 2]}}; {"x" * 6000}; ={client.cookie[:9]}; {client.cookie}; last'
    assert "layers.0.weight" in client.ask().text


def test_another_servers_cookie_is_none(client: Client, folder: Path) -> None:
    with serving(folder) as other:
        stranger = Client(other)
        stranger.enter()
        client.cookie = stranger.cookie
        assert client.ask("/events").status == 401


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "", "[::2]"])
@pytest.mark.parametrize("path", ["/", "/events", "/watch.js"])
def test_another_host_name_is_refused_even_with_the_cookie(client: Client, host: str, path: str) -> None:
    client.enter()
    assert client.ask(path, Host=host).status == 421


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9000", "LOCALHOST", "[::1]:1234"])
def test_this_machine_may_be_called_by_its_names_also_through_a_forwarded_port(client: Client, host: str) -> None:
    assert client.ask(Host=host).status == 200


def test_on_all_interfaces_addresses_are_allowed_but_no_foreign_names() -> None:
    assert allowed("192.168.1.7:8000", LOOPBACK, True)
    assert allowed("[fe80::1]:8000", LOOPBACK, True)
    assert not allowed("192.168.1.7:8000", LOOPBACK, False)
    assert not allowed("rebound.example", LOOPBACK, True)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE"])
@pytest.mark.parametrize("path", ["/", "/events", "/watch.js", "/nothing"])
def test_methods_other_than_get_are_refused(client: Client, method: str, path: str) -> None:
    client.enter()
    assert client.ask(path, method).status == 405


def test_the_token_is_not_taken_by_get(client: Client) -> None:
    assert client.ask("/enter").status == 405
    assert "needs its token" in client.ask(f"/?token={client.server.url.partition('#token=')[2]}").text


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pages_of_others_get_no_events_even_with_the_cookie(client: Client, site: str) -> None:
    client.enter()
    assert client.ask("/events", Sec_Fetch_Site=site).status == 403


@pytest.mark.parametrize("path", ["/", "/watch.js", "/events", "/nothing", "/enter"])
def test_every_answer_carries_the_policy(client: Client, path: str) -> None:
    headers = client.ask(path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["cache-control"] == "no-store"
    assert "server" not in headers


def test_an_endless_head_is_cut_off(client: Client) -> None:
    with socket.create_connection(("127.0.0.1", client.port), timeout=BOUND_S) as connection:
        try:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (1 << 20))
            answer = connection.recv(100)
        except ConnectionError:
            answer = b""
    assert answer == b"" or b" 400 " in answer


def test_it_listens_on_loopback_only(client: Client) -> None:
    assert client.server.address.startswith("http://127.0.0.1:")


def test_news_arrive_when_the_folder_grows(follower: Client, folder: Path) -> None:
    follower.enter()
    with follower.events() as events:
        version, parts = next(events)
        assert "running, step 20" in parts["status"]
        assert {"verdict", "timeline", "overhead", "lateness", "measured"} <= set(parts)
        grow(folder, 21)
        later, parts = next(events)
        assert int(later) > int(version)
        assert "running, step 21" in parts["status"]
        assert "parameters" not in parts  # they have not changed
        finish(folder, 21)
        assert "the run ended after step 21" in next(events)[1]["status"]


def test_a_page_opened_before_the_first_step_has_a_place_for_all_that_follows(tmp_path: Path) -> None:
    grow(tmp_path, 0)
    with serving(tmp_path) as server:
        client = Client(server)
        client.enter()
        places = re.findall(r'<section id="(\w+)">', client.ask().text)
        grow(tmp_path, 20)
        with client.events(Last_Event_ID="1") as events:
            parts = next(events)[1]
    assert {"facts", "timeline", "overhead", "lateness"} <= set(parts)
    assert set(parts) <= {*places, "status"}


def test_who_comes_back_is_told_only_what_is_new(follower: Client, folder: Path) -> None:
    follower.enter()
    with follower.events() as events:
        version, _ = next(events)
    grow(folder, 22)
    with follower.events(Last_Event_ID=version) as events:
        _, parts = next(events)
    assert "running, step 22" in parts["status"]
    assert "parameters" not in parts


@pytest.mark.parametrize("since", ["999999", "-1", "x", "1" * 400, "½"])
def test_who_claims_an_odd_version_is_told_everything(client: Client, since: str) -> None:
    client.enter()
    client.ask()
    with client.events(Last_Event_ID=since.encode("utf-8").decode("latin-1")) as events:
        assert "verdict" in next(events)[1]


def test_a_folder_that_vanishes_ends_no_session(follower: Client, folder: Path) -> None:
    follower.enter()
    assert "layers.0.weight" in follower.ask().text
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    with follower.events() as events:
        assert "step 20" in next(events)[1]["status"]


def test_watching_changes_nothing_in_the_folder(follower: Client, folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    follower.enter()
    follower.ask()
    with follower.events() as events:
        next(events)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_no_name_becomes_a_tag_in_what_is_sent_live(tmp_path: Path) -> None:
    for number, text in enumerate(HOSTILE):
        with serving(hostile_folder(tmp_path / str(number), text)) as server:
            client = Client(server)
            client.enter()
            with client.events() as events:
                html = "".join(next(events)[1].values())
        assert set(re.findall(r"<[^ >]*", html)) <= TAGS
        assert all(letter.isprintable() or letter == "\n" for letter in html)


def test_metrics_are_for_who_brings_the_token(client: Client) -> None:
    token = client.server.url.partition("#token=")[2]
    assert client.ask("/metrics").status == 401
    for wrong in ("Bearer", "Bearer x", f"Basic {token}", f"Bearer {token}x"):
        assert client.ask("/metrics", Authorization=wrong).status == 401, wrong
    answer = client.ask("/metrics", Authorization=f"Bearer {token}")
    assert answer.status == 200
    assert "gradsync_step_seconds" in answer.text
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert client.ask("/events", Authorization=f"Bearer {token}").status == 401  # it is for metrics only
