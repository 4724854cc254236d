"""A plugin of pytest: says which test runs and what became of it; runs the tests asked for, in that order."""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path

import pytest

_WANTED = os.environ.get("MUTANTS_WANTED")  # a file with the ids of tests, first to last
_page = None
if "MUTANTS_TEST" in os.environ:
    with open(os.environ["MUTANTS_TEST"], "r+b") as file:
        _page = memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _WANTED:
        place = {name: number for number, name in enumerate(json.loads(Path(_WANTED).read_text()))}
        items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])


def pytest_runtest_logstart(nodeid: str) -> None:
    if _page is not None:
        _page[0] += 1
    _write(start=nodeid, number=None if _page is None else _page[0])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _write(test=report.nodeid, when=report.when, outcome=report.outcome, seconds=round(report.duration, 3))


def _write(**line: object) -> None:
    with open(os.environ["MUTANTS_REPORT"], "a") as file:
        file.write(json.dumps(line) + "\n")
