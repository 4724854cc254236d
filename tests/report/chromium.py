"""Debian's Chromium without a window, for tests of pages."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

_BROWSER, _DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = None if _BROWSER and _DRIVER else "needs Debian's chromium and chromium-driver (apt-get install both)"


@contextmanager
def chromium(home: Path) -> Iterator[Chrome]:
    """A browser that keeps everything under `home` and logs what it loads."""
    options = ChromeOptions()
    options.binary_location = _BROWSER or ""
    for argument in (
        "--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", f"--user-data-dir={home}",
        "--disable-background-networking", "--disable-component-update", "--no-proxy-server", "--hide-scrollbars",
    ):  # fmt: skip
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # root has none
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=Service(_DRIVER))
    try:
        driver.set_page_load_timeout(60)
        yield driver
    finally:
        driver.quit()


def prefer(driver: Chrome, scheme: str) -> None:
    """light or dark, as a user's system says."""
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )


def resize(driver: Chrome, width: int, height: int = 800) -> None:
    """A screen of this size; narrow ones are phones."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1 if width > 500 else 2, "mobile": width <= 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def requests(driver: Chrome) -> list[str]:
    """Addresses asked for since last time."""
    entries: list[dict[str, Any]] = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [entry["params"]["request"]["url"] for entry in entries if entry["method"] == "Network.requestWillBeSent"]


def complaints(driver: Chrome) -> list[str]:
    """What the console says, since last time."""
    return [entry["message"] for entry in driver.get_log("browser")]
