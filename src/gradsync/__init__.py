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
from gradsync.compress.across import across_hosts
from gradsync.compress.by_parameter import by_parameter, rule
from gradsync.compress.cast import bf16, fp16
from gradsync.compress.feedback import error_feedback
from gradsync.compress.integers import int4, int8
from gradsync.compress.powersgd import powersgd
from gradsync.compress.randomk import randomk
from gradsync.compress.sign import sign
from gradsync.compress.topk import topk
from gradsync.compress.warmup import warmup
from gradsync.engine.attachment import attach
from gradsync.engine.profiling import profile
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
from gradsync.integrations.ddp import ddp_hook
from gradsync.integrations.observing import observe
from gradsync.launch import init
from gradsync.links import Cluster, Link
from gradsync.paces import accumulate, async_sgd, delayed, diloco, every_step, gossip, local_sgd, nesterov
from gradsync.plan import Plan
from gradsync.planner.automatic import auto
from gradsync.planner.profile import ModelProfile
from gradsync.planner.recommending import recommend
from gradsync.policy import Guard
from gradsync.ranks import RankFailed, spawn

__all__ = [
    "BackwardAborted",
    "Cluster",
    "Disagreement",
    "GradSync",
    "GradSyncError",
    "Guard",
    "LaunchError",
    "Link",
    "ModelProfile",
    "NonFinite",
    "NotEnoughMemory",
    "PeerFault",
    "PeerLost",
    "Plan",
    "RankFailed",
    "SyncTimeout",
    "accumulate",
    "across_hosts",
    "all_reduce",
    "async_sgd",
    "attach",
    "auto",
    "bf16",
    "by_parameter",
    "ddp_hook",
    "delayed",
    "diloco",
    "error_feedback",
    "every_step",
    "fp16",
    "gossip",
    "halving_doubling",
    "hierarchical",
    "init",
    "int4",
    "int8",
    "local_sgd",
    "native",
    "nesterov",
    "observe",
    "powersgd",
    "profile",
    "randomk",
    "recommend",
    "ring",
    "rule",
    "shared_empty",
    "shared_memory",
    "sign",
    "spawn",
    "topk",
    "tree",
    "warmup",
]


def __dir__() -> list[str]:
    """What is public; the folders behind it can be imported, and are nobody's interface."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
