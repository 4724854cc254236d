"""gradsync keeps the replicas of a data-parallel PyTorch training run in step.

    import gradsync as gs

    gs.init()
    sync = gs.attach(model, optimizer)

Everything else in the training loop stays as it is.
"""

from gradsync.allreduce.halving_doubling import halving_doubling
from gradsync.allreduce.hierarchical import hierarchical
from gradsync.allreduce.native import native
from gradsync.allreduce.ring import ring
from gradsync.allreduce.shared_memory import shared_memory
from gradsync.allreduce.tree import tree
from gradsync.engine.attachment import attach
from gradsync.engine.synchronizer import GradSync
from gradsync.errors import (
    BackwardAborted,
    Disagreement,
    GradSyncError,
    LaunchError,
    NonFinite,
    NotEnoughMemory,
    PeerFault,
    PeerLost,
    SyncTimeout,
)
from gradsync.exchange.single import all_reduce, shared_empty
from gradsync.launch import init
from gradsync.plan import Plan, accumulate, every_step
from gradsync.policy import Guard
from gradsync.ranks import RankFailed, spawn

__all__ = [
    "BackwardAborted",
    "Disagreement",
    "GradSync",
    "GradSyncError",
    "Guard",
    "LaunchError",
    "NonFinite",
    "NotEnoughMemory",
    "PeerFault",
    "PeerLost",
    "Plan",
    "RankFailed",
    "SyncTimeout",
    "accumulate",
    "all_reduce",
    "attach",
    "every_step",
    "halving_doubling",
    "hierarchical",
    "init",
    "native",
    "ring",
    "shared_empty",
    "shared_memory",
    "spawn",
    "tree",
]
