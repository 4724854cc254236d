"""Ranks as forks of one process that has imported what they need: their collector leaves alone what it has imported.

There are 300,000 objects of it. A full collection would take 0.2 s of every rank to look through them, and would give
each rank a copy of their pages.
"""

from __future__ import annotations

import gc
from multiprocessing.context import ForkServerContext, ForkServerProcess


class WarmProcess(ForkServerProcess):
    def run(self) -> None:
        gc.freeze()
        super().run()


class WarmContext(ForkServerContext):
    Process = WarmProcess
