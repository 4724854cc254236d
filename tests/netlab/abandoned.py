"""A process that makes a lab, has ranks at work in it, and waits to be killed: `python abandoned.py [share]`."""

from __future__ import annotations

import json
import os
import sys

from netlab.lab import Lab

if __name__ == "__main__":
    with Lab(hosts=3, share_processes=sys.argv[1:] == ["share"]) as lab:
        print(json.dumps([os.stat(f"/proc/{init}/ns/net").st_ino for init in lab.inits]), flush=True)
        command = ["sh", "-c", "setsid sleep 1000 & echo up; sleep 1000"]
        lab.run(command, timeout=1000, echo=lambda rank, line: print(line, flush=True))
