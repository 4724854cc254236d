"""Makes docs/images from a real run: two processes of this machine train, and the input of one of them is slow.

.venv/bin/python docs/screenshots.py        needs Debian's chromium and chromium-driver
"""

from __future__ import annotations

import base64
import io
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from selenium.webdriver import Chrome
from selenium.webdriver.support.wait import WebDriverWait
from torch import nn

import gradsync as gs
from gradsync.cli.watch.terminal import view
from gradsync.report.live.feed import Reader
from gradsync.report.live.server import Server
from gradsync.report.page import page
from gradsync.report.summary import summarize
from gradsync.trace.reader import read_run

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "report"))
from chromium import MISSING, chromium, prefer, resize  # noqa: E402

IMAGES = ROOT / "docs" / "images"
RANKS, STEPS = 2, 160
WIDTH, LAYERS, BATCH = 512, 8, 128
SLOW_RANK = 1


def main() -> None:
    if MISSING is not None:
        raise SystemExit(MISSING)
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, chromium(Path(scratch) / "chromium") as driver:
        folder = Path(scratch) / "run"
        training = threading.Thread(target=gs.spawn, args=(train, RANKS, str(folder)), kwargs={"timeout": 300})
        training.start()
        try:
            watch_phone(driver, folder)
        finally:
            training.join()
        report(driver, folder, Path(scratch) / "report.html")
        terminal(folder)


def train(folder: str) -> None:
    """A plain loop; gradsync writes the trace."""
    rank = torch.distributed.get_rank()
    layers = [module for _ in range(LAYERS) for module in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = gs.attach(model, optimizer, gs.Plan(compress=gs.int8(), bucket_bytes=2 << 20), trace=folder)
    for x, y in sync.data(batches(rank)):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    sync.detach()


def batches(rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """After a third of the run, reading a batch takes one rank half as long as training on one."""
    before = time.perf_counter()
    train_s: list[float] = []
    for step in range(STEPS):
        if step < STEPS // 3:
            train_s.append(time.perf_counter() - before)
        elif rank == SLOW_RANK:
            time.sleep(statistics.median(train_s) / 2)
        before = time.perf_counter()
        yield torch.randn(BATCH, WIDTH), torch.randint(10, (BATCH,))


def watch_phone(driver: Chrome, folder: Path) -> None:
    """The live page in the dark, while the run goes on."""
    reader = Reader(folder)
    WebDriverWait(driver, 120, ignored_exceptions=(ValueError,)).until(lambda _: reader.look().run.ranks[RANKS - 1])
    server = Server(folder)
    serving = threading.Thread(target=server.run)
    serving.start()
    try:
        resize(driver, 390, 844)
        prefer(driver, "dark")
        driver.get(server.url)
        script = "return +(document.getElementById('status')?.textContent.match(/running, step ([0-9]+)/) || [0, 0])[1]"
        WebDriverWait(driver, 120, 0.2).until(lambda _: driver.execute_script(script) > STEPS * 3 // 4)
        shoot(driver, IMAGES / "watch-phone.png")
        driver.get("about:blank")
    finally:
        server.stop()
        serving.join()


def report(driver: Chrome, folder: Path, path: Path) -> None:
    run = read_run(folder)
    path.write_text(page(run, summarize(run)), encoding="utf-8")
    resize(driver, 1100)
    driver.get(path.as_uri())
    for scheme, name in (("light", "report.png"), ("dark", "report-dark.png")):
        prefer(driver, scheme)
        below = driver.execute_script("return document.querySelector('#lateness').getBoundingClientRect().bottom")
        shoot(driver, IMAGES / name, {"x": 0, "y": 0, "width": 1100, "height": below + 16, "scale": 1})


def terminal(folder: Path) -> None:
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(view(Reader(folder).look(), 100))
    drawn = console.export_svg(title="gradsync watch run --terminal")
    path = IMAGES / "watch-terminal.svg"
    # Without the fonts that rich would load from elsewhere: any monospaced one will do.
    path.write_text(re.sub(r"@font-face \{[^}]*\}|<!--.*?-->", "", drawn, flags=re.DOTALL), encoding="utf-8")
    print(path.relative_to(ROOT))


def shoot(driver: Chrome, path: Path, clip: dict[str, float] | None = None) -> None:
    options = {"format": "png", **({"clip": clip, "captureBeyondViewport": True} if clip else {})}
    path.write_bytes(base64.b64decode(driver.execute_cdp_cmd("Page.captureScreenshot", options)["data"]))
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
