"""The state of a run, as far as its folder tells: whether it still goes on."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from gradsync.report.wording import printable
from gradsync.trace.reader import RunTrace

QUIET_S = 30  # without a new line, after which that is said

Mark = frozenset[tuple[str, int, int]]


class RunState(NamedTuple):
    """The state of a run."""

    kind: str  # live, quiet, ended, failed
    text: str

    @property
    def over(self) -> bool:
        return self.kind in ("ended", "failed")


def state_of(run: RunTrace, silent_s: float) -> RunState:
    """The state that follows from each rank's last lines, and from how long ago the latest were written."""
    step = max((trace.steps[-1].step for trace in run.ranks.values() if trace.steps), default=0)
    failed = [trace.errors[-1] for trace in run.ranks.values() if trace.errors and not trace.left_in_order]
    gone = {rank for rank, trace in run.ranks.items() if trace.errors or trace.end is not None}
    gone |= {rank for error in failed for rank in error.ranks}  # who is killed says nothing; the others name it
    complete = len(gone) >= run.world_size
    # A file that is not here, of another host perhaps, will never tell its end.
    if complete or (silent_s >= QUIET_S and gone >= set(run.ranks)):
        if failed:
            first = min(failed, key=lambda error: error.step)
            return RunState("failed", f"the run failed in step {first.step}: {printable(first.what)}")
        whose = "the run" if complete else f"{len(run.ranks)} of {run.world_size} ranks (no files of the others)"
        return RunState("ended", f"{whose} ended after step {step}")
    if silent_s >= QUIET_S:
        return RunState("quiet", f"no news for {_roughly(silent_s)}, after step {step}")
    return RunState("live", f"running, step {step}")


def look_of(folder: Path) -> Mark:
    """Return what changes whenever a rank writes; empty if there is no such folder."""
    found = set()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("rank-") and entry.name.endswith(".jsonl"):
                    stat = entry.stat()
                    found.add((entry.name, stat.st_ino, stat.st_size))
    except OSError:
        return frozenset()
    return frozenset(found)


def silence_s(folder: Path) -> float:
    """The seconds for which nobody has written."""
    times = []
    for path in folder.glob("rank-*.jsonl"):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(0.0, time.time() - max(times)) if times else 0.0


def _roughly(seconds: float) -> str:
    """The time in steps that grow, so that it need not be told anew every second.

    >>> _roughly(31), _roughly(119), _roughly(200), _roughly(8000)
    ('30 s', '90 s', '3 min', '2 h')
    """
    if seconds < 120:
        return f"{int(seconds // 30) * 30} s"
    return f"{int(seconds // 60)} min" if seconds < 7200 else f"{int(seconds // 3600)} h"
