"""From one plan to another between two steps: a new engine under the same GradSync, the old one closed.

    synchronization 7 │ step │ border: open ─ carry over ─ install ─ close │ forward │ synchronization 8
    old engine        ───────────────────────────────────────────────┤
    new engine                         ├────────────────────────────────────────────────────────────────

The new one is opened first: if it cannot be, the old one goes on. For a moment both have buckets, but that is before
forward, when nothing else of a step is in memory.
"""

from __future__ import annotations

import torch

from gradsync.engine.building import Builder
from gradsync.engine.reducer import Reducer
from gradsync.engine.steps import Steps
from gradsync.plan import Plan


def switch(steps: Steps, builder: Builder, plan: Plan) -> None:
    """Run with `plan` from now on; every rank calls this at once, at a border.

    Raises ValueError on all of them if the plan does not fit here; then nothing has changed.
    """
    if plan == steps.plan:
        return
    opened = builder.open(plan)
    old, old_pace = steps.reducer, steps.pace
    arrangement, kept = old.agenda.arrangement(), old.shipping.kept()
    _own_gradients(old)
    engine = builder.build(plan, opened)
    new = engine.reducer
    new.shipping.replace(kept)
    new.agenda.arrange(arrangement)
    new.weighting.unit, new.weighting.weight = old.weighting.unit, old.weighting.weight
    new.dropped, new.delivered = old.dropped, old.delivered
    new.recorder.count = old.recorder.count
    new.lane.step = old.lane.step
    steps.install(engine)
    # All ranks have met in the new lane, so nobody reads from the old one any more; but a stream may be behind.
    if any(not channel.on_host for channel in old.lane.groups.data.values()):
        torch.cuda.synchronize()
    old_pace.close(together=True)
    old.lane.close(together=True)


def _own_gradients(reducer: Reducer) -> None:
    """Gradients that lie in buckets get memory of their own, and parameters forget where they stood."""
    for entry in reducer.entries:
        grad = entry.param.grad
        if grad is not None and grad._is_view():
            entry.param.grad = grad.clone()
        entry.seen = -1
        entry.kept = None
