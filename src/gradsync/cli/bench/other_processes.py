"""The work of others on this host while we measured: a comparison on a busy machine is none.

Arms do not suffer alike: beside other processes MPI's median came out at 40 µs in one run and at 8 ms in the next,
gloo's near 1 ms in both. Taking turns does not make that fair, so it is measured, and said.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from gradsync.cli.bench.rank_exchange import collect

_TOLERABLE_CORES = 0.2
_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # among the columns of a line: idle, and waiting for a disk
_COLUMNS = 8  # user to steal; what follows is counted in user already


class OtherProcesses:
    """Counts from its making on; ranks of one host make and ask it together."""

    def __init__(self) -> None:
        self._start, self._host_s, self._own_s = time.monotonic(), _host_s(), time.process_time()

    def cores(self) -> float:
        """Return how many cores the other processes of the host kept busy; on rank 0, elsewhere 0."""
        elapsed, host_s = time.monotonic() - self._start, _host_s() - self._host_s
        ranks_s = sum(own_s for [own_s] in collect([time.process_time() - self._own_s]))
        return max(0.0, host_s - ranks_s) / elapsed if ranks_s else 0.0


def disturbing(busy_cores: float | None) -> bool:
    """Return whether others work so much that a comparison of arms is worthless; None: nobody looked."""
    return (busy_cores or 0.0) > _TOLERABLE_CORES


def disturbance(busy_cores: float, cores: int) -> str:
    """The disturbance in words, to be continued.

    >>> disturbance(1.25, 2)
    'Other processes kept 1.2 of 2 cores busy meanwhile, which does not slow all arms alike'
    """
    return f"Other processes kept {busy_cores:.1f} of {cores} cores busy meanwhile, which does not slow all arms alike"


def _host_s() -> float:
    """Seconds of all cores together in which they were not idle."""
    return parse_busy_ticks(_STAT.read_text()) / os.sysconf("SC_CLK_TCK")


def parse_busy_ticks(stat: str) -> int:
    """The busy ticks in the first line of /proc/stat.

    >>> parse_busy_ticks("cpu  10 1 5 900 50 2 3 4 0 0")
    25
    """
    columns = [int(text) for text in stat.splitlines()[0].split()[1 : 1 + _COLUMNS]]
    return sum(ticks for column, ticks in enumerate(columns) if column not in _IDLE)
