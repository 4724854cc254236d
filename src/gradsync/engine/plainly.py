"""GRADSYNC_DISABLE=1: plain exact averaging, whatever the plan says, to find out whether gradsync is the problem."""

from __future__ import annotations

import os
from dataclasses import replace

from gradsync.allreduce.native import native
from gradsync.paces import Accumulate, every_step
from gradsync.plan import Plan
from gradsync.planner.automatic import Auto

NOTICE = (
    "GRADSYNC_DISABLE is set: gradients are averaged exactly in every step, by the process group's own all-reduce, "
    "whatever the plan says"
)


def is_disabled() -> bool:
    """Whether the variable is set, to something else than 0."""
    return os.environ.get("GRADSYNC_DISABLE", "0") not in ("", "0")


def plain(plan: Plan | Auto) -> Plan:
    """The plan without anything clever. Windows of accumulate(k) stay: the loop counts on them.

    >>> plain(Plan(bucket_bytes=4096)).algorithm
    Native()
    """
    if not isinstance(plan, Plan):
        return Plan(algorithm=native())
    pace = plan.pace if isinstance(plan.pace, Accumulate) else every_step()
    return replace(plan, algorithm=native(), compress=None, pace=pace, audit_every=None)
