"""A run that has not begun: wait for its folder, but not for ever."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from gradsync.cli.shared import BadInput
from gradsync.report.live.feed import FeedReader, FeedUpdate
from gradsync.report.wording import printable
from gradsync.transport.awake_clock import AwakeClock
from gradsync.units import show_seconds

_LOOK_S = 0.5


def await_run(
    folder: Path, patience_s: float, sleep: Callable[[float], None] = time.sleep
) -> tuple[FeedReader, FeedUpdate]:
    """A reader of the run, and its first news; `BadInput` if none begins in time."""
    reader = FeedReader(folder)
    said = False
    bound = AwakeClock(patience_s)
    while True:
        try:
            return reader, reader.look()
        except ValueError as error:
            if folder.exists() and not folder.is_dir():
                raise BadInput(f"gradsync watch: {error}") from None
            if bound.over():
                waited = f" (waited {show_seconds(patience_s)} for it: --patience)" if patience_s else ""
                raise BadInput(f"gradsync watch: {error}{waited}") from None
        if not said:
            print(f"Waiting for a run to begin in {printable(str(folder))} ...", file=sys.stderr, flush=True)
            said = True
        sleep(_LOOK_S)
