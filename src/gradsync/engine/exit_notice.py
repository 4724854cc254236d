"""A rank whose process ends while others still train: it hears of it too, on its standard error."""

from __future__ import annotations

import atexit
import sys
import weakref
from functools import partial

from gradsync.engine.loop import StepLoop
from gradsync.errors import JOIN, listed
from gradsync.transport.blame import PeerViews
from gradsync.transport.heartbeat import Phase

_IN_A_STEP = (Phase.BACKWARD, Phase.SYNCHRONIZING, Phase.WAITING)


class ExitNotice:
    """Looks at the other ranks of this host once, when the interpreter ends; waits for nobody."""

    def __init__(self, steps: StepLoop) -> None:
        self._look = partial(_look, weakref.ref(steps))
        if steps.lane.groups.size > 1:
            atexit.register(self._look)  # after the lane's, so it is called before that one leaves
            weakref.finalize(steps, atexit.unregister, self._look).atexit = False

    def close(self) -> None:
        """All ranks know that this one leaves."""
        atexit.unregister(self._look)


def _look(reference: weakref.ref[StepLoop]) -> None:
    steps = reference()
    if steps is None or steps.failed or getattr(sys, "last_value", None) is not None:
        return
    lane = steps.lane
    if training := going_on(lane.liveness.peer_views(), lane.step):
        who = listed(lane.global_ranks(training))
        print(f"{lane.place()} this rank ends, but {who} would go on: {JOIN}", file=sys.stderr, flush=True)


def going_on(views: PeerViews, step: int) -> list[int]:
    """Return who has begun a step that this rank will not come to."""
    return [
        rank
        for rank, view in views.items()
        if not view.gone and view.state.phase in _IN_A_STEP and view.state.step >= step
    ]
