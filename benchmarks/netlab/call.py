"""Call one function as a rank: `python call.py FD JOB`; its value goes to the file FD as JSON."""

from __future__ import annotations

import importlib
import json
import os
import sys


def call(fd: int, job: str) -> None:
    request = json.loads(job)
    sys.path[:] = request["path"]
    value = getattr(importlib.import_module(request["module"]), request["function"])(*request["arguments"])
    with os.fdopen(fd, "w") as file:
        json.dump(value, file)


if __name__ == "__main__":
    call(int(sys.argv[1]), sys.argv[2])
