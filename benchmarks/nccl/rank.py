"""One rank: `python rank.py JOB`, started by `launch.py`. When done it ends at once, whatever threads are left."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Not this folder itself, which Python puts first: its files are of the package `nccl`.
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

from nccl.crew import Crew  # noqa: E402
from nccl.hook_profile import profile_hooks  # noqa: E402
from nccl.point_to_point import point_to_point  # noqa: E402
from nccl.training import train  # noqa: E402

_WORK = {"train": train, "p2p": point_to_point, "profile": profile_hooks}


def main() -> int:
    try:
        job = json.loads(sys.argv[1])
        crew = Crew(job)
        for work in job["work"]:
            _WORK[work](crew, job)
        crew.leave()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
