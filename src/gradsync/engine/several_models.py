"""The waits of several models of one loop outside of backward, in one order on every rank.

Note [One order]
    Ranks may call the models of a step in another order. What comes before a batch (the vote of join(), the choice of
    `gs.auto()`) waits for the other ranks at once, so the model that is called first sees to it for all of them, in the
    order in which they were attached. A vote is then a promise for a batch that is still to come; who has no such batch
    keeps the others company once, as `join()` always did.

    rank 0    A(x) ─ vote A ─ vote B ─ forward    B(y) ─ forward    backward
    rank 1    B(y) ─ vote A ─ vote B ─ forward    A(x) ─ forward    backward

    Who is out of data does not know in what order the others go on: then each model waits on a thread of its own. So
    join() blocks of one thread that lie in each other end together, with the outermost.

All of it is of one thread: models that are trained by another one are its own affair.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from gradsync.engine.shared_backward import side_by_side

if TYPE_CHECKING:
    from gradsync.engine.loop import StepLoop


class JoinEnd(NamedTuple):
    """The way in which one of them ends its join()."""

    shadow: Callable[[], None]  # waits for the others' batches
    level: Callable[[], None]  # then everything comes from a rank that was active last


class _ThreadModels(threading.local):
    """The models of this thread."""

    def __init__(self) -> None:
        self.choosing: weakref.WeakSet[StepLoop] = weakref.WeakSet()  # with `gs.auto()`
        self.joined: dict[StepLoop, JoinEnd | None] = {}  # inside join(), or waiting for the outermost one to end
        self.busy = False


_here = _ThreadModels()


def chooses(steps: StepLoop) -> None:
    """A model may have to wait for a choice of `gs.auto()` before a batch."""
    _here.choosing.add(steps)


def forget(steps: StepLoop) -> None:
    """A model is detached."""
    _here.choosing.discard(steps)


def before_batch(steps: StepLoop, others_first: bool = True) -> None:
    """Choose and vote, for all models that have to: see [One order].

    `others_first`: what raised in the others' earlier batches is dropped first, since other ranks wait there.
    """
    models = sorted({*_here.choosing, *_here.joined, steps}, key=lambda each: each.number)
    if len(models) == 1 or _here.busy or not steps.waits:
        steps.border()
        steps.vote_if_joining()
        return
    models = [each for each in models if not each.failed]
    _here.busy = True
    try:
        if others_first:
            for each in models:
                if each is not steps and (each.active is not None or not each.joining):
                    each.dropped_batches.drop_raised_beside_others()
        for each in models:
            if each is steps or each.is_due():
                each.border()
        for each in models:
            each.vote_if_joining()
    finally:
        _here.busy = False


def enter(steps: StepLoop) -> None:
    """A join() block begins."""
    _here.joined[steps] = None
    steps.join_begins()


def leave(steps: StepLoop, end: JoinEnd) -> None:
    """A join() block ends in good order: with the outermost one, all do."""
    _here.joined[steps] = end
    ends = [each for _, each in sorted(_here.joined.items(), key=lambda pair: pair[0].number) if each is not None]
    if len(ends) == len(_here.joined):
        side_by_side([(each.shadow, each.level) for each in ends])


def left(steps: StepLoop) -> None:
    """A join() block has ended, in whatever order; it is over if another one is not still to end."""
    if _here.joined.get(steps) is None:
        _here.joined.pop(steps, None)
        _over(steps)
    if None not in _here.joined.values():
        while _here.joined:
            _over(_here.joined.popitem()[0])


def _over(steps: StepLoop) -> None:
    steps.join_ends()
