"""Who hears of the moments of a step: `gs.auto()` takes their times, and switches plans between two of them.

border ─▶ forward_begins ─▶ backward_begins ─▶ arrived … ─▶ backward_ends ─▶ synchronized
                                                                             ─▶ optimizer_begins, optimizer_ends
"""

from __future__ import annotations

from typing import Protocol


class Witness(Protocol):
    """What `Steps` tells."""

    def border(self) -> None:
        """Nothing of the next synchronization exists yet: other buckets may take the place of these.

        All ranks come here between the same two synchronizations, before anything else that they do together.
        """

    def forward_begins(self) -> None: ...
    def backward_begins(self) -> None: ...
    def arrived(self, index: int) -> None:
        """The gradient of this parameter; only where buckets do not leave during backward."""

    def backward_ends(self) -> None: ...
    def synchronized(self, counts: bool) -> None:
        """The gradients are averaged; `counts` False: without a backward of this rank, or they were dropped."""

    def optimizer_begins(self) -> None: ...
    def optimizer_ends(self) -> None: ...


class Nobody:
    """A witness that forgets: the plan was given."""

    def border(self) -> None: ...
    def forward_begins(self) -> None: ...
    def backward_begins(self) -> None: ...
    def arrived(self, index: int) -> None: ...
    def backward_ends(self) -> None: ...
    def synchronized(self, counts: bool) -> None: ...
    def optimizer_begins(self) -> None: ...
    def optimizer_ends(self) -> None: ...
