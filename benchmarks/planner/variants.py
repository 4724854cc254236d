"""The plans that are predicted and measured, and the links."""

from __future__ import annotations

from typing import NamedTuple

import gradsync as gs

RATES = ("50mbit", "100mbit", "250mbit", "500mbit", "1gbit")
LOOPBACK, MEMORY = "loopback", "shared memory"
LINKS = (*RATES, LOOPBACK, MEMORY)
"""Between hosts of one rank each; or all ranks on one host, over TCP or in shared memory."""


class Variant(NamedTuple):
    """A plan, and how many steps make one sample: a multiple of the pace's period."""

    name: str
    plan: gs.Plan | None  # None: no synchronization at all, to see whether the machine still is as it was profiled
    warm_up: int = 3  # steps: the engine learns the order of gradients in the first
    window: int = 4
    apart: bool = False  # not one of the cells that the goal is about


CONTROL = "no sync"
VARIANTS = (
    Variant(CONTROL, None),
    Variant("exact", gs.Plan()),
    Variant("bf16", gs.Plan(compress=gs.bf16())),
    Variant("int8", gs.Plan(compress=gs.int8())),
    Variant("powersgd", gs.Plan(compress=gs.powersgd(4))),
    Variant("accumulate", gs.Plan(pace=gs.accumulate(4)), 8, 8, apart=True),
    Variant("diloco", gs.Plan(pace=gs.diloco(8)), 8, 8, apart=True),
)


def plan_of(arm: Variant, link: str) -> gs.Plan | None:
    """On loopback gloo's own all-reduce is asked for: the default would be shared memory."""
    plan = arm.plan
    return plan if plan is None or link != LOOPBACK else gs.Plan(gs.native(), plan.compress, plan.pace)
