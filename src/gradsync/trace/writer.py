"""A rank's file: what is written is with the kernel at once, and there after a crash.

The file is bounded. When it has half of what it may have, it becomes the older half, and a new one begins with the same
header; the older half before it goes away. A disk that fails ends the trace, not the training.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from pathlib import Path

from gradsync import files
from gradsync.trace.json_lines import to_json
from gradsync.trace.lines import BucketLayout, ClockShift, Line, PlanChoice, RunHeader

LIMIT_NBYTES = 64 << 20


class Writer:
    """Appends lines; see `lines`."""

    def __init__(self, folder: Path, run: RunHeader, limit_nbytes: int = LIMIT_NBYTES) -> None:
        self.path = folder / f"rank-{run.rank}.jsonl"
        self._limit_nbytes = limit_nbytes
        self._pid = os.getpid()
        # What a reader of the newer half needs too.
        self._opening: dict[type, Line] = {RunHeader: run}
        self._fd = -1
        self._nbytes = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            self._give_up(error)
        self.write(run)

    def write(self, *lines: Line) -> None:
        """Write lines at once; nothing if the file is closed, or in a forked child."""
        for line in lines:
            if isinstance(line, BucketLayout | ClockShift | PlanChoice):
                self._opening[type(line)] = line
        if self._fd < 0 or os.getpid() != self._pid:
            return
        try:
            self._append(lines)
            if self._nbytes > self._limit_nbytes // 2:
                self._rotate()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        self._fd = files.open_to_write(self.path, os.O_WRONLY | os.O_APPEND, 0o644)
        self._nbytes = os.fstat(self._fd).st_size
        if self._nbytes and not _ends_with_a_line(self.path):
            os.write(self._fd, b"\n")  # an earlier run was cut off in the middle of a line

    def _append(self, lines: Iterable[Line]) -> None:
        text = "".join([to_json(line) + "\n" for line in lines])
        self._nbytes += os.write(self._fd, text.encode("utf-8", errors="replace"))

    def _rotate(self) -> None:
        self.close()
        os.replace(self.path, self.path.with_name(f"{self.path.stem}.old.jsonl"))
        self._open()
        self._append(self._opening.values())

    def _give_up(self, error: OSError) -> None:
        self.close()
        warnings.warn(f"the trace in {self.path} ends here, and training goes on: {error}", stacklevel=3)


def _ends_with_a_line(path: Path) -> bool:
    with files.open_to_read(path) as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
