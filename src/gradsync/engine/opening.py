"""The opening: the ranks agree, then each makes the lane, the ways and the shipping that the plan asks for."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch.distributed as dist

from gradsync.compress.by_parameter import idle_patterns
from gradsync.engine.inventory import Inventory
from gradsync.errors import Disagreement
from gradsync.exchange.exact import Exact
from gradsync.exchange.shipping import Shipping, main_device, travelling_devices
from gradsync.exchange.ways import Misfit
from gradsync.guard.door import check_door
from gradsync.guard.header import HEAD_NBYTES
from gradsync.plan import Plan
from gradsync.policy import Guard
from gradsync.transport.groups import group_timeout
from gradsync.transport.lane import NET_S, Lane, open_lane


class Papers(NamedTuple):
    """What a rank shows at the door."""

    table: list[dict[str, Any]]  # of its parameters and buffers
    terms: dict[str, Any]  # the plan, and whatever else must be the same everywhere
    refusal: Exception | None = None  # what it found wrong before: the others are told


class Opened(NamedTuple):
    """What gradients travel by."""

    lane: Lane
    exact: Exact
    shipping: Shipping


def open_shipping(
    parent: dist.ProcessGroup, plan: Plan, guard: Guard, inventory: Inventory, papers: Papers, always: bool
) -> Opened:
    """Agree and begin; every member of `parent` calls this at once, and either all go on or all raise."""
    timeout = guard.timeout if guard.timeout is not None else group_timeout(parent)
    # Control only: the groups for data wait until the ranks have agreed on which they need.
    lane = open_lane(parent, guard, timeout)
    try:
        refusal = papers.refusal
        check_door(lane, papers.table, papers.terms, None if refusal is None else str(refusal))
        if refusal is not None:
            raise refusal
        _warn_of_idle_rules(lane, plan, inventory)
        lane.open_team(HEAD_NBYTES + len(inventory.entries))
        devices = {tensor.device for tensor in inventory.tensors()}
        exact = Exact(lane, parent, plan.algorithm, travelling_devices(parent, devices, plan), timeout + NET_S)
        shipping = Shipping(lane, parent, exact, plan, main_device(devices), timeout + NET_S, always)
    except BaseException as error:
        # These all ranks come to together: nothing is under way.
        lane.close(together=error is refusal or isinstance(error, Disagreement | Misfit))
        if isinstance(error, Misfit):
            raise ValueError(str(error)) from None
        raise
    return Opened(lane, exact, shipping)


def _warn_of_idle_rules(lane: Lane, plan: Plan, inventory: Inventory) -> None:
    idle = idle_patterns(plan.compress, [entry.name for entry in inventory.entries])
    if idle and lane.groups.rank == 0:
        warnings.warn(
            f"by_parameter: no parameter's name fits {', '.join(map(repr, idle))}; is it misspelt? The names are those "
            "of model.named_parameters()",
            stacklevel=5,
        )
