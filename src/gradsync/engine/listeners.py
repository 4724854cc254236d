"""Who hears of the moments of a step: `gs.auto()`, which switches plans between two of them, and the trace.

border ─▶ forward_begins ─▶ backward_begins ─▶ arrived … ─▶ backward_ends ─▶ synchronized, or step_ended
                                                                             ─▶ optimizer_begins, optimizer_ends
"""

from __future__ import annotations

from typing import Protocol


class Listener(Protocol):
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

    def step_ended(self) -> None:
        """The same, where a pace averages something else than gradients, or later."""

    def optimizer_begins(self) -> None: ...
    def optimizer_ends(self) -> None: ...
    def failed(self, error: BaseException) -> None:
        """Nothing more will be synchronized."""


class NoListener:
    """A listener that forgets: the plan was given."""

    def border(self) -> None: ...
    def forward_begins(self) -> None: ...
    def backward_begins(self) -> None: ...
    def arrived(self, index: int) -> None: ...
    def backward_ends(self) -> None: ...
    def synchronized(self, counts: bool) -> None: ...
    def step_ended(self) -> None: ...
    def optimizer_begins(self) -> None: ...
    def optimizer_ends(self) -> None: ...
    def failed(self, error: BaseException) -> None: ...


class TwoListeners:
    """Two witnesses, told in this order."""

    def __init__(self, first: Listener, second: Listener) -> None:
        self._first, self._second = first, second

    def border(self) -> None:
        self._first.border()
        self._second.border()

    def forward_begins(self) -> None:
        self._first.forward_begins()
        self._second.forward_begins()

    def backward_begins(self) -> None:
        self._first.backward_begins()
        self._second.backward_begins()

    def arrived(self, index: int) -> None:
        self._first.arrived(index)
        self._second.arrived(index)

    def backward_ends(self) -> None:
        self._first.backward_ends()
        self._second.backward_ends()

    def synchronized(self, counts: bool) -> None:
        self._first.synchronized(counts)
        self._second.synchronized(counts)

    def step_ended(self) -> None:
        self._first.step_ended()
        self._second.step_ended()

    def optimizer_begins(self) -> None:
        self._first.optimizer_begins()
        self._second.optimizer_begins()

    def optimizer_ends(self) -> None:
        self._first.optimizer_ends()
        self._second.optimizer_ends()

    def failed(self, error: BaseException) -> None:
        self._first.failed(error)
        self._second.failed(error)
