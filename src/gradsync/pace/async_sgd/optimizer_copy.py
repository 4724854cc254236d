"""The user's optimizer once more, over a shard's own parameters.

    user's optimizer   groups ─ hyper-parameters ─▶ noted with every push of this rank
                       state  ─ taken over once ──▶ copy: same class, groups of masters, state of its own

The user's own `step()` finds no gradients and does nothing; a scheduler goes on changing its groups, and the
copy follows.

Note [Noted hyper-parameters]
    A scheduler steps after this rank's push, but the update of that clock may come later, with the last push of
    the others. So the hyper-parameters are noted at the push, and the update uses what was noted: with
    max_staleness=0 just what a synchronous step would have used.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

# Schedulers and the engine put these on the user's instance; the optimizer copy's steps are not the user's.
_NOT_TAKEN_OVER = ("step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

Masters = Mapping[torch.nn.Parameter, torch.nn.Parameter]  # the user's parameter to the shard's


class OptimizerCopy:
    """An optimizer of the class of `source` that steps the masters of the parameters which `source` steps."""

    def __init__(self, source: Optimizer, masters: Masters) -> None:
        # Its hooks know the engine, which must not live on for the sake of a receiver thread.
        self._source = weakref.ref(source)
        mine = {p: masters[p] for group in source.param_groups for p in group["params"] if p in masters}
        self._members = [[mine[p] for p in group["params"] if p in mine] for group in source.param_groups]
        # Its __init__ is the user's and may take anything; only what it made is needed.
        self._optimizer: Optimizer = object.__new__(type(source))
        self._optimizer.__dict__.update({k: v for k, v in vars(source).items() if k not in _NOT_TAKEN_OVER})
        self._optimizer._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer._optimizer_step_post_hooks = OrderedDict()
        self._optimizer.state = defaultdict(dict)
        for parameter, master in mine.items():
            if parameter in source.state:
                self._optimizer.state[master] = {k: _own(v) for k, v in source.state[parameter].items()}
        self.note()

    def note(self) -> None:
        """Take over the hyper-parameters as they are now."""
        source = self._source()
        if source is None:
            return
        self._optimizer.param_groups = [
            {key: _own(value) for key, value in group.items() if key != "params"} | {"params": members}
            for group, members in zip(source.param_groups, self._members, strict=False)  # groups may be added
            if members
        ]

    def step(self, lr_scale: float) -> None:
        """One update from the masters' gradients, with this part of the learning rate."""
        groups = self._optimizer.param_groups
        if not groups:
            return
        rates = [group["lr"] for group in groups] if lr_scale != 1.0 else []
        for group, lr in zip(groups, rates, strict=False):
            group["lr"] = lr * lr_scale
        self._optimizer.step()
        for group, lr in zip(groups, rates, strict=False):
            group["lr"] = lr

    def state_of(self, master: torch.nn.Parameter) -> dict[str, Any]:
        """Return what the optimizer keeps for a master; empty before its first update."""
        return self._optimizer.state.get(master, {})

    def set_state(self, master: torch.nn.Parameter, state: dict[str, Any]) -> None:
        if state:
            self._optimizer.state[master] = state
        else:
            self._optimizer.state.pop(master, None)


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
