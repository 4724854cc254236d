"""The arms, as data: a name, how its replica is made, and where it takes part.

To add one, add a line to `COMPRESSORS` or to `VARIANTS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.optim import Optimizer

import gradsync as gs
from gradsync.compress.recipe import Compressor
from slow_link.replica import Replica, ddp, ddp_powersgd, ours, plain

BASE = "no sync"
DDPS = ("DDP", "DDP, bucket view")
"""The better one of these is what others are compared with."""
HALF = "DDP, fp16 hook"
EXACT = "gradsync"

COMPRESSORS: dict[str, Compressor] = {
    "bf16": gs.bf16(),
    "fp16": gs.fp16(),
    "int8": gs.int8(),
    "int4": gs.int4(),
    "sign": gs.sign(),
    "topk 1 %": gs.topk(0.01),
    "topk 0.1 %": gs.topk(0.001, block=16384),  # of 1024 it would be two: 0.2 %
    "randomk 1 %": gs.randomk(0.01),
    "topk 10 %": gs.topk(0.1),
    "powersgd 4": gs.powersgd(4),
    "powersgd 16": gs.powersgd(16),
    "powersgd 32": gs.powersgd(32),
    "by parameter": gs.by_parameter(
        [
            gs.rule(dims=1, compress=None),
            gs.rule("characters.*", compress=gs.bf16()),  # embeddings
            gs.rule("places.*", compress=gs.bf16()),
        ],
        default=gs.powersgd(4),
    ),
}

WARM_UP_STEPS = 100
WARM_UP = ", warm-up"
# After it they cost in a step what the compressors inside cost.
WARMED_UP: dict[str, Compressor] = {
    f"{name}{WARM_UP}": gs.warmup(COMPRESSORS[name], WARM_UP_STEPS)
    for name in ("sign", "topk 1 %", "topk 10 %", "powersgd 4", "powersgd 16")
}


@dataclass(frozen=True)
class Variant:
    """One way to train.

    Args:
        make: Of a model and its optimizer, the replica.
        window: Steps from one synchronization to the next; what is timed is whole windows.
        learns: Whether it takes part in `loss`; not where another arm computes the same.
        timed: Whether it takes part in `steps`; likewise.
        compress: For ranks that are played in one process: what their gradients go through; None: nothing.
    """

    make: Callable[[nn.Module, Optimizer], Replica]
    window: int = 1
    learns: bool = True
    timed: bool = True
    compress: Compressor | None = None


def _compressed(recipe: Compressor, timed: bool) -> Variant:
    return Variant(partial(ours, plan=gs.Plan(compress=recipe)), timed=timed, compress=recipe)


VARIANTS: dict[str, Variant] = {
    BASE: Variant(plain, learns=False),
    "DDP": Variant(ddp),
    "DDP, bucket view": Variant(partial(ddp, view=True), learns=False),
    HALF: Variant(partial(ddp, view=True, half=True)),
    "DDP, PowerSGD hook 4": Variant(partial(ddp_powersgd, rank=4)),
    "DDP, accumulate 4": Variant(partial(ddp, view=True, every=4), window=4, learns=False),
    EXACT: Variant(partial(ours, plan=gs.Plan())),
    "gradsync, accumulate 4": Variant(partial(ours, plan=gs.Plan(pace=gs.accumulate(4))), window=4),
    **{f"gradsync, {name}": _compressed(recipe, True) for name, recipe in COMPRESSORS.items()},
    **{f"gradsync, {name}": _compressed(recipe, False) for name, recipe in WARMED_UP.items()},
}
