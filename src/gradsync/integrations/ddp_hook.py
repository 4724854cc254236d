"""`ddp_hook`: every compressor and algorithm under DistributedDataParallel, as its communication hook."""

# No postponed annotations here: DDP reads those of the hook, and wants the types themselves.

import weakref
from collections.abc import Callable
from itertools import chain

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from gradsync.engine.assemble import AttachRequest, open_sender
from gradsync.engine.parameters import Inventory, take_inventory
from gradsync.integrations.ddp_state import DDPState
from gradsync.plan.guard import Guard
from gradsync.plan.pace_recipe import exchange_of
from gradsync.plan.sync_plan import Plan, not_a_plan

Hook = Callable[[DDPState, GradBucket], torch.futures.Future[torch.Tensor]]


def ddp_hook(plan: Plan, ddp: DistributedDataParallel, *, guard: Guard | None = None) -> tuple[DDPState, Hook]:
    """Let the gradients of a DistributedDataParallel model travel as `plan` says.

        state, hook = gs.ddp_hook(gs.Plan(compress=gs.int8()), ddp)
        ddp.register_comm_hook(state, hook)

    Every rank of the model's process group calls this at once, before the first backward. DDP goes on to decide
    which parameters share a bucket and when it leaves; see docs/ddp.md for what a hook cannot do.

    Args:
        plan: What travels (`compress`, `audit_every`) and which way (`algorithm`). What DDP decides itself is refused.
        ddp: The wrapped model.
        guard: Bounds on waits; see `Guard`.
    """
    return open_hook(plan, ddp, guard, always=False)


def open_hook(plan: Plan, ddp: DistributedDataParallel, guard: Guard | None, always: bool) -> tuple[DDPState, Hook]:
    """Do what `ddp_hook` does; `always` compresses even where one rank is alone (to measure it)."""
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"ddp_hook(plan, ddp) takes a DistributedDataParallel, got {type(ddp).__name__}; "
            "wrap the model first, or use gs.attach(model, optimizer, plan), which needs no wrapper"
        )
    parent, refusal = ddp.process_group, None
    guard = Guard() if guard is None else guard
    try:
        _check_plan(plan)
        _check_guard(guard)
        inventory = take_inventory(ddp.module, (), ignored_by(ddp))
        _refuse_sparse(inventory)
    except (TypeError, ValueError) as error:
        if dist.get_world_size(parent) == 1:
            raise
        # What was refused is not looked at again: this rank only tells the others.
        refusal, inventory, plan, guard = error, Inventory([], [], set()), Plan(), Guard()
    request = AttachRequest(inventory.table(()), plan.canonical() | {"under": "DDP"}, refusal)
    opened = open_sender(parent, plan, guard, inventory, request, always)
    return DDPState(plan, inventory.entries, opened, weakref.ref(ddp)), average_bucket


def average_bucket(state: DDPState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook: DDP calls it when a bucket is full."""
    return state.launch(bucket)


def _check_plan(plan: Plan) -> None:
    if not isinstance(plan, Plan):
        raise TypeError(not_a_plan(plan))
    if not exchange_of(plan.pace).every_backward:
        raise ValueError(
            f"pace={plan.pace!r} is not for a DDP hook, which sees only the backwards that synchronize; "
            "run the others under ddp.no_sync(), or use gs.attach"
        )
    if plan.overlap != "backward":
        raise ValueError(
            f"overlap={plan.overlap!r} is not for a DDP hook, since DDP decides when a bucket leaves; "
            "leave it out, or use gs.attach"
        )
    if plan.bucket_bytes is not None:
        raise ValueError(
            f"bucket_bytes={plan.bucket_bytes} is not for a DDP hook, since DDP makes the buckets; "
            f"pass bucket_cap_mb={plan.bucket_bytes / (1 << 20):.3g} to DistributedDataParallel instead"
        )
    if plan.combine != "mean":
        raise ValueError(
            f"combine={plan.combine!r} is not for a DDP hook: whoever uses DDP expects the mean; "
            "multiply the loss by the number of ranks, or use gs.attach"
        )


def _check_guard(guard: Guard) -> None:
    if not isinstance(guard, Guard):
        raise TypeError(f"guard must be a gs.Guard, got {guard!r}")
    if guard.nonfinite != "allow":
        raise ValueError(
            f"Guard(nonfinite={guard.nonfinite!r}) is not for a DDP hook, which has no header to vote by: a NaN "
            "reaches every rank, as in DDP; look at the gradients after backward, or use gs.attach"
        )


def _refuse_sparse(inventory: Inventory) -> None:
    for entry in inventory.entries:
        if entry.sparse:
            raise ValueError(
                f"parameter {entry.name} has sparse gradients, which DDP gives to a hook without their layout; "
                "use gs.attach, or an embedding with sparse=False"
            )


def ignored_by(ddp: DistributedDataParallel) -> list[torch.Tensor]:
    """Return what DDP leaves alone too."""
    module = ddp.module
    named = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return [tensor for name, tensor in named if name in ddp.parameters_to_ignore]
