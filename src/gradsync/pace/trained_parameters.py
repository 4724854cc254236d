"""The parameters that travel where parameters do: all that required a gradient at attach. Nobody changes the others."""

from __future__ import annotations

import warnings

from gradsync.errors import GradSyncError
from gradsync.exchange.means import level
from gradsync.pace.contract import PaceContext, State


class TrainedParameters:
    """The trained parameters by name, and a look at those that are not to become one."""

    def __init__(self, context: PaceContext) -> None:
        self._context = context
        self._lane = context.lane
        self.named = [(name, param) for name, param in context.parameters if param.requires_grad]
        self.params = [param for _, param in self.named]
        self._frozen = [(name, param) for name, param in context.parameters if not param.requires_grad]

    def check(self) -> None:
        """Raise if one was thawed: it would change here, and never travel."""
        for name, param in self._frozen:
            if param.requires_grad:
                raise GradSyncError(
                    f"{self._lane.place()} parameter {name} was frozen at attach and requires a gradient now, so it "
                    "would not be averaged; call sync.detach() before you thaw it, and attach again after"
                )

    def drop_gradients(self) -> None:
        """The next step applies nothing."""
        for param in self.params:
            param.grad = None

    def level(self) -> None:
        """Make them equal on all ranks: their mean. Every rank calls this at once."""
        level(self._context.lane, self._context.exact, self.params)

    def warn_of_another(self, kind: str, shared: State) -> None:
        """Warn of a state of such a pace, but of other parameters. Of a state of another pace, the engine warns."""
        if any(key.startswith(f"{kind}.") for key in shared) and self._lane.groups.rank == 0:
            warnings.warn(
                f"{self._lane.place()} this state was saved with other parameters frozen: {kind} begins anew, from the "
                "mean of the ranks' parameters",
                stacklevel=6,
            )
