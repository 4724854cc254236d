"""The arms, as data: a name, how its replica is made, how many steps one turn of it takes.

To add one, add a line to `PACES`. An arm that cannot be made fails alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.optim import Optimizer

import gradsync as gs
from gradsync.plan.paces import Pace
from slow_link.model import SIZES
from slow_link.replica import Replica, ddp, plain

BASE = "no sync"
PEER = "DDP"
EXACT = "every_step"
NUM_RANKS = 2
LINK = "100mbit"

SHAPE = SIZES["small"]  # 1.8 million parameters

_TURN = 10  # steps, at least


@dataclass(frozen=True)
class Variant:
    """One way to train.

    Args:
        make: Of a model and its optimizer, the replica.
        window: Steps from one synchronization to the next; what is timed is whole windows.
        stretch: It learns for so many times the steps of the others, over which its learning rate falls.
        like: Another arm, whose steps take as long as its own.
        learns: Whether it takes part in `learn`.
    """

    make: Callable[[nn.Module, Optimizer], Replica]
    window: int = 1
    stretch: float = 1.0
    like: str | None = None
    learns: bool = True

    @property
    def turn(self) -> int:
        """Steps in a timed turn: whole windows.

        >>> Variant(plain).turn, Variant(plain, window=8).turn, Variant(plain, window=50).turn
        (10, 16, 50)
        """
        return -(-_TURN // self.window) * self.window


def paced(model: nn.Module, optimizer: Optimizer, *, plan: gs.Plan) -> Replica:
    """gradsync."""
    sync = gs.attach(model, optimizer, plan)

    def close() -> None:
        finish(sync, optimizer)
        sync.detach()

    return Replica(model, model, optimizer, lambda: 0.0, close=close)


def finish(sync: gs.GradSync, optimizer: Optimizer) -> None:
    """What every loop ends with: bring to its end what is under way."""
    while sync.drain():
        optimizer.step()
        optimizer.zero_grad()


def _variant(pace: Pace, window: int = 1, *, int4: bool = False) -> Variant:
    plan = gs.Plan(pace=pace, compress=gs.int4() if int4 else None)
    return Variant(partial(paced, plan=plan), window)


_OUTER = gs.nesterov(0.7, 0.9)

PACES: dict[str, Variant] = {
    EXACT: _variant(gs.every_step()),
    "accumulate(50)": _variant(gs.accumulate(50), 50),
    "local_sgd(50)": _variant(gs.local_sgd(50), 50),
    "diloco(50)": _variant(gs.diloco(50, _OUTER), 50),
    "diloco(50), int4": _variant(gs.diloco(50, _OUTER), 50, int4=True),
    "diloco(50), streaming": _variant(gs.diloco(50, _OUTER, fragments=5, delay=2, mixing=0.5), 50),
    "delayed(1)": _variant(gs.delayed(1)),
    "async_sgd(0)": _variant(gs.async_sgd(0)),
    "async_sgd(4)": _variant(gs.async_sgd(4)),
    "gossip(ring)": _variant(gs.gossip("ring")),
}


def _longer(name: str, stretch: float) -> dict[str, Variant]:
    arm = PACES[name]
    return {f"{name}, {stretch:g} × the steps": Variant(arm.make, arm.window, stretch, like=name)}


VARIANTS: dict[str, Variant] = {
    BASE: Variant(plain, learns=False),
    PEER: Variant(partial(ddp, view=True)),
    **PACES,
    # What a step less synchronized saves may be spent on more steps.
    **_longer("local_sgd(50)", 1.5),
    **_longer("diloco(50)", 1.5),
}
