"""What every benchmark shares: arms that take turns, medians with spread, and a results file.

Machines are noisy, so arms run interleaved in one process, each round in another order, and what is reported is the
median of the ratios within a round.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

Samples = dict[str, list[float]]


def interleave(arms: dict[str, Callable[[], float]], rounds: int, tick: Callable[[], None] | None = None) -> Samples:
    """`rounds` samples of every arm; each arm returns the seconds of one turn."""
    samples: Samples = {name: [] for name in arms}
    names = list(arms)
    for i in range(rounds):
        shift = i % len(names)
        for name in names[shift:] + names[:shift]:
            samples[name].append(arms[name]())
        if tick is not None:
            tick()
    return samples


def paired_ratio(samples: Samples, arm: str, base: str) -> tuple[float, float, float]:
    """Median and quartiles of arm / base within a round."""
    ratios = [a / b for a, b in zip(samples[arm], samples[base], strict=True)]
    low, _, high = quantiles(ratios, n=4)
    return median(ratios), low, high


def milliseconds(samples: list[float]) -> str:
    """Median and quartiles, for a table."""
    low, middle, high = (1e3 * q for q in quantiles(samples, n=4))
    return f"{middle:.1f} ({low:.1f}–{high:.1f})"


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    facts: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def commit(folder: Path) -> str:
    """The commit that was measured, with + if the tree had changes; "unknown" outside of a clone."""
    try:
        name = _git(folder, "rev-parse", "--short", "HEAD")
        dirty = _git(folder, "status", "--porcelain", "-uno")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("+" if dirty else "")


def save(path: Path, results: dict[str, Any]) -> None:
    """Write results with machine and commit; other keys already in the file stay."""
    stored = json.loads(path.read_text()) if path.exists() else {}
    stored.update(results)
    path.write_text(json.dumps(stored, indent=1) + "\n")


def rounded(samples: Samples) -> Samples:
    """Microseconds are enough in a file."""
    return {name: [round(value, 6) for value in values] for name, values in samples.items()}


def table(header: list[str], rows: Iterator[list[str]] | list[list[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.check_output(command, cwd=folder, text=True, stderr=subprocess.DEVNULL).strip()


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()
