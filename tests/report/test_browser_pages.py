"""The report and the live page in a real browser."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from chromium import MISSING, chromium, complaints, prefer, requests, resize
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from gradsync.report.page import page
from gradsync.report.summary import summarize
from gradsync.trace.lines import Health
from gradsync.trace.reader import read_run
from hostile_names import HOSTILE, hostile_folder
from live_server import BOUND_S, finish, grow, serving
from made_runs import made_run

pytestmark = [pytest.mark.skipif(MISSING is not None, reason=str(MISSING)), pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with chromium(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


@pytest.fixture
def driver(browser: Chrome) -> Chrome:
    """Fresh: light, wide, nothing logged."""
    browser.get("about:blank")
    prefer(browser, "light")
    resize(browser, 1100)
    requests(browser), complaints(browser)
    return browser


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = made_run(
        steps=300, slow={1: {"input": 0.05}}, ratio=4.0, stats={"staleness_histogram_1": 3},
        health=(Health(9, "nonfinite", [2], "w", 3, "rank 2 had NaN in w"),),
    )  # fmt: skip
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page(run, summarize(run)), encoding="utf-8")
    return path


def until(driver: Chrome, holds: Callable[[], bool]) -> None:
    """Bounded."""
    WebDriverWait(driver, BOUND_S, poll_frequency=0.05).until(lambda _: holds())


def status(driver: Chrome) -> str:
    found = driver.execute_script("return document.getElementById('status')?.textContent")
    return str(found or "")


def brightness(driver: Chrome, selector: str, colour: str) -> float:
    """0 is black, 1 is white."""
    script = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]].match(/[0-9.]+/g)"
    red, green, blue = map(float, driver.execute_script(script, selector, colour)[:3])
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


def test_the_report_opens_without_complaint_and_asks_the_network_for_nothing(driver: Chrome, report: Path) -> None:
    driver.get(report.as_uri())
    assert driver.find_element(By.TAG_NAME, "h1").text.startswith("Sync costs")
    assert [url for url in requests(driver) if not url.startswith("data:")] == [report.as_uri()]
    assert complaints(driver) == []
    shown = driver.execute_script("return [...document.querySelectorAll('section')].filter(s => s.offsetHeight).length")
    assert shown >= 9


def test_in_the_dark_the_page_is_dark_and_stays_readable(driver: Chrome, report: Path) -> None:
    driver.get(report.as_uri())
    for scheme, page_is_dark in (("light", False), ("dark", True)):
        prefer(driver, scheme)
        for ground, ink, colour in (("body", "h1", "color"), ("section#facts", "svg text", "fill")):
            behind, text = brightness(driver, ground, "backgroundColor"), brightness(driver, ink, colour)
            assert (behind < 0.2) == page_is_dark
            assert abs(behind - text) > 0.5


SHOWN = """return [...document.querySelectorAll('.drawn')].filter(e => e.offsetHeight).map(e => {
  const texts = [...e.querySelectorAll('text')], box = e.getBoundingClientRect();
  const ends = texts.map(t => t.getBoundingClientRect()), sizes = texts.map(t => t.getBoundingClientRect().height);
  return [e.className, box.left, box.right, e.scrollWidth - e.clientWidth,
          Math.min(...ends.map(r => r.left)), Math.max(...ends.map(r => r.right)), Math.min(...sizes)];
})"""


@pytest.mark.parametrize("width", [360, 500, 768, 1100])
def test_on_any_screen_every_picture_is_whole_to_its_end_which_is_now(driver: Chrome, report: Path, width: int) -> None:
    resize(driver, width)
    driver.get(report.as_uri())
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    shown = driver.execute_script(SHOWN)
    assert len(shown) == 4
    for kind, left, right, hidden, first, last, height in shown:
        assert kind == ("drawn narrow" if width < 704 else "drawn wide")
        assert left >= 0
        assert right <= width
        assert hidden == 0
        assert left - 1 <= first < last <= right + 1
        assert height > 9  # px: it can be read
    [now] = driver.execute_script(
        "return [...document.querySelectorAll('#overhead .drawn')].filter(e => e.offsetHeight)"
        ".map(e => [...e.querySelectorAll('text')].filter(t => t.textContent === '300')"
        ".map(t => t.getBoundingClientRect().right))"
    )
    assert len(now) == 1
    assert now[0] <= width


def test_hostile_names_neither_run_nor_widen_the_page(driver: Chrome, tmp_path: Path) -> None:
    resize(driver, 360)
    for number, text in enumerate(HOSTILE):
        run = read_run(hostile_folder(tmp_path / str(number), text))
        path = tmp_path / f"{number}.html"
        path.write_text(page(run, summarize(run)), encoding="utf-8")
        driver.get(path.as_uri())
        assert driver.execute_script("return document.documentElement.scrollWidth") <= 360
        assert driver.execute_script("return document.querySelectorAll('img, script, b[onmouseover]').length") == 0
        assert complaints(driver) == []
    assert all(url.startswith(("file:", "data:")) for url in requests(driver))


def test_the_live_page_enters_by_its_token_and_hides_it(driver: Chrome, tmp_path: Path) -> None:
    grow(tmp_path, 20)
    with serving(tmp_path) as server:
        driver.get(server.url)
        until(driver, lambda: status(driver) == "running, step 20")
        assert driver.current_url == server.address
        assert driver.execute_script("return document.cookie") == ""
        assert complaints(driver) == []
        asked = [url for url in requests(driver) if not url.startswith("data:")]
        assert all(url.startswith(server.address) for url in asked)
        assert not any("token" in url.partition("#")[0] for url in asked)
        driver.get("about:blank")


def test_a_wrong_token_stays_outside(driver: Chrome, tmp_path: Path) -> None:
    grow(tmp_path, 3)
    with serving(tmp_path) as server:
        driver.get(f"{server.address}#token=wrong")
        until(driver, lambda: "not the token" in driver.find_element(By.ID, "door").text)
        assert status(driver) == ""
        driver.get("about:blank")


def test_the_live_page_follows_the_run_to_its_end(driver: Chrome, tmp_path: Path) -> None:
    grow(tmp_path, 20)
    resize(driver, 240)  # only the table of parameters has to be scrolled
    with serving(tmp_path) as server:
        driver.get(server.url)
        until(driver, lambda: status(driver) == "running, step 20")
        driver.execute_script("document.querySelector('#parameters .wide').scrollLeft = 17")
        before = driver.find_element(By.ID, "overhead").get_attribute("innerHTML")
        grow(tmp_path, 21)
        until(driver, lambda: status(driver) == "running, step 21")
        assert driver.find_element(By.ID, "overhead").get_attribute("innerHTML") != before
        assert driver.execute_script("return document.querySelector('#parameters .wide').scrollLeft") == 17
        assert driver.execute_script("return document.documentElement.scrollWidth") <= 240
        finish(tmp_path, 21)
        until(driver, lambda: status(driver) == "the run ended after step 21")
        assert complaints(driver) == []
        driver.get("about:blank")


def test_the_live_page_runs_no_hostile_name(driver: Chrome, tmp_path: Path) -> None:
    folder = hostile_folder(tmp_path / "run", "".join(HOSTILE[:6]))
    with serving(folder) as server:
        driver.get(server.url)
        until(driver, lambda: status(driver) != "")
        for path in folder.glob("*.jsonl"):  # the same again, by an event
            with open(path, "a", encoding="utf-8") as file:
                file.write(path.read_text("utf-8").splitlines()[-2].replace('"step":12', '"step":13') + "\n")
        before = driver.find_element(By.ID, "health").get_attribute("innerHTML")
        until(driver, lambda: driver.find_element(By.ID, "health").get_attribute("innerHTML") != before)
        assert driver.execute_script("return document.querySelectorAll('img, script:not([src])').length") == 0
        assert complaints(driver) == []
        driver.get("about:blank")


def test_a_cut_connection_is_told_and_taken_up_again(driver: Chrome, tmp_path: Path) -> None:
    grow(tmp_path, 20)
    with serving(tmp_path) as server, forwarded(urlsplit(server.address).port or 0) as wire:
        driver.get(f"http://127.0.0.1:{wire.port}/#{urlsplit(server.url).fragment}")
        until(driver, lambda: status(driver) == "running, step 20")
        grow(tmp_path, 21)
        until(driver, lambda: status(driver) == "running, step 21")  # by an event: the connection stands
        wire.cut()
        until(driver, lambda: status(driver).startswith("connection lost"))
        grow(tmp_path, 22)
        wire.mend()
        until(driver, lambda: status(driver) == "running, step 22")
        driver.get("about:blank")


class Wire:
    """A forwarded port, as ssh -L makes one, that can be cut."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._broken = False
        self.port = self._listener.getsockname()[1]
        self._start(self._accept)

    def cut(self) -> None:
        self._broken = True
        self._hang_up()

    def mend(self) -> None:
        self._broken = False

    def close(self) -> None:
        self._broken = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._hang_up()
        for thread in self._threads:
            thread.join(BOUND_S)
        for each in [self._listener, *self._open]:
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(near)
            if self._broken:
                near.close()
                continue
            far = socket.create_connection(("127.0.0.1", self._to), timeout=BOUND_S)
            self._open.append(far)
            self._start(self._copy, near, far)
            self._start(self._copy, far, near)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _hang_up(self) -> None:
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _start(self, does: Callable[..., None], *arguments: socket.socket) -> None:
        thread = threading.Thread(target=does, args=arguments, name="wire", daemon=True)
        self._threads.append(thread)
        thread.start()


@contextmanager
def forwarded(to: int) -> Iterator[Wire]:
    wire = Wire(to)
    try:
        yield wire
    finally:
        wire.close()
