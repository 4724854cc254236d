"""The errors that the world causes: one class per kind, each message a sentence with the way out.

A caller's mistake is a `ValueError` or `TypeError`; these are for faults of peers, networks and time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


class GradSyncError(RuntimeError):
    """Any fault of the world that synchronization met; the base of all others."""


class LaunchError(GradSyncError):
    """A launcher announced several tasks, but no group of them formed."""


class Disagreement(GradSyncError):
    """The ranks do not hold the same thing: parameters, plans, or calls in different order.

    Every rank raises it with the same text.
    """


class NonFinite(GradSyncError):
    """A gradient held NaN or Inf, and the guard was told to raise."""


class BackwardAborted(GradSyncError):
    """A gradient arrived after its bucket had left; the step cannot be averaged any more."""


class NotEnoughMemory(GradSyncError):
    """Shared memory could not be reserved; the sentence says how much was needed."""


class PeerFault(GradSyncError):
    """Some ranks did not take part; `ranks` says which."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[type[PeerFault], tuple[str, tuple[int, ...]]]:
        """Pickle the ranks too: process pools and frameworks hand errors from process to process."""
        return type(self), (str(self), self.ranks)


class PeerLost(PeerFault):
    """A rank died, or gave no sign of life for `Guard.dead_after` seconds."""


class SyncTimeout(PeerFault):
    """A rank is alive but did not arrive within `Guard.timeout` seconds."""


# What to do where a rank ends before the others.
JOIN = (
    "if ranks have unequally many batches, train inside `with sync.join():` on every rank, or let all take equally "
    "many steps"
)


def say(sentence: str) -> None:
    """Write a line to stderr in one write: the ranks of all hosts often share one terminal."""
    sys.stderr.write(f"gradsync: {sentence}\n")
    sys.stderr.flush()


def place(rank: int, world_size: int, step: int | None = None, bucket: int | None = None) -> str:
    """The prefix of every message that a rank raises.

    >>> place(2, 8, step=41, bucket=3)
    '[rank 2/8 step 41 bucket 3]'
    """
    where = f"rank {rank}/{world_size}"
    if step is not None:
        where += f" step {step}"
    if bucket is not None:
        where += f" bucket {bucket}"
    return f"[{where}]"


def listed(ranks: Sequence[int]) -> str:
    """Ranks as a reader says them.

    >>> listed([1]), listed([0, 2, 3])
    ('rank 1', 'ranks 0, 2 and 3')
    """
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
