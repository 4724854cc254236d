"""results.json, which several runs may fill in pieces and at once: each cell is written when it is done."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

Results = dict[str, dict[str, Any]]  # part, then cell


def load(path: Path) -> Results:
    return json.loads(path.read_text()) if path.exists() else {}


def keep(path: Path, part: str, cell: str, value: Any) -> None:
    """Put one cell into the file, in place of what it held; everything else stays."""
    folder = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # the folder, since the file itself is replaced
        results = load(path)
        results.setdefault(part, {})[cell] = value
        written = path.with_suffix(".new")
        written.write_text(json.dumps(results, indent=1) + "\n")
        os.replace(written, path)
    finally:
        os.close(folder)
