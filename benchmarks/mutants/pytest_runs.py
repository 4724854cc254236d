"""One pytest on a copy of the tree, in a session of its own, and what became of each test."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path("src/gradsync")
TREE = ["src", "tests", "benchmarks", "docs", "examples", "pyproject.toml", "README.md"]


class Ran(NamedTuple):
    """What one pytest did: the numbers, seconds and last outcome of its tests; `code` is None past the time limit."""

    code: int | None
    number: dict[str, int]
    seconds: dict[str, float]
    outcome: dict[str, str]

    @property
    def failed(self) -> list[str]:
        return [test for test, outcome in self.outcome.items() if outcome == "failed"]

    @property
    def passed(self) -> list[str]:
        return [test for test, outcome in self.outcome.items() if outcome == "passed"]


def copy_tree(to: Path) -> Path:
    kept_out = shutil.ignore_patterns("__pycache__", ".hypothesis", "native", "results.json", "*.svg")
    for name in TREE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=kept_out)
        else:
            shutil.copy(ROOT / name, to / name)
    return to


def file_of(test: str) -> str:
    return test.partition("::")[0]


def room_of(test: str) -> str:
    """Of tests/pace/test_x.py::test_y, or of the doctests in src/gradsync/pace."""
    return test.removeprefix("tests/").removeprefix(f"{PACKAGE}/").split("/")[0]


def run_tests(
    tree: Path, files: list[str], limit: float, wanted: list[str] | None = None, told: Path | None = None,
    quiet: bool = True,
) -> Ran:  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="m") as folder:
        report, page, order = (Path(folder) / name for name in ("report", "page", "wanted"))
        env = {**os.environ, "MUTANTS_REPORT": str(report), "TMPDIR": folder, "GLOO_SOCKET_IFNAME": "lo"}
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        paths = [str(tree / "src"), str(tree / "benchmarks" / "mutants"), os.environ.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        if told is not None:
            page.write_bytes(bytes(8))
            env |= {"MUTANTS_TEST": str(page), "MUTANTS_PASSED": str(told)}
        options = ["-q", "-p", "mutants_plugin", "-p", "no:cacheprovider", "--timeout=60", "--hypothesis-seed=1"]
        if wanted is not None:
            order.write_text(json.dumps(wanted))
            env["MUTANTS_WANTED"] = str(order)
            options.append("-x")
        command = [sys.executable, "-m", "pytest", *options, *files]
        sink = subprocess.DEVNULL if quiet else None
        child = subprocess.Popen(command, cwd=tree, env=env, stdout=sink, stderr=sink, start_new_session=True)
        code: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = child.wait(limit)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # its ranks, too
            child.wait()
        return _read(code, report)


def _read(code: int | None, report: Path) -> Ran:
    ran = Ran(code, {}, {}, {})
    for text in report.read_text().splitlines() if report.exists() else []:
        line = json.loads(text)
        if "start" in line:
            ran.number[line["start"]] = line["number"] or 0
        else:
            test = line["test"]
            ran.seconds[test] = round(ran.seconds.get(test, 0.0) + line["seconds"], 3)
            if ran.outcome.get(test) in (None, "passed"):
                ran.outcome[test] = line["outcome"]
    for test in ran.number:
        ran.outcome.setdefault(test, "failed")  # begun, and the process ended
    return ran
