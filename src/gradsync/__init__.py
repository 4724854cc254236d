"""gradsync keeps the replicas of a data-parallel PyTorch training run in step.

    import gradsync as gs

    gs.init()
    sync = gs.attach(model, optimizer)

Everything else in the training loop stays as it is.
"""

from gradsync.algorithms.builtin import native, shared_memory
from gradsync.algorithms.halving_doubling import halving_doubling
from gradsync.algorithms.hierarchical import hierarchical
from gradsync.algorithms.ring import ring
from gradsync.algorithms.tree import tree
from gradsync.autotune.profiling import profile
from gradsync.cluster import Cluster, Link
from gradsync.compress.by_parameter import by_parameter, rule
from gradsync.compress.cast import bf16, fp16
from gradsync.compress.integers import int4, int8
from gradsync.compress.powersgd import powersgd
from gradsync.compress.randomk import randomk
from gradsync.compress.sign import sign
from gradsync.compress.topk import topk
from gradsync.compress.wrappers import across_hosts, error_feedback, warmup
from gradsync.engine.attach import attach
from gradsync.engine.handle import GradSync
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
from gradsync.exchange.all_reduce import all_reduce, shared_empty
from gradsync.integrations.ddp_hook import ddp_hook
from gradsync.integrations.observe import observe
from gradsync.launch.init import init
from gradsync.launch.spawn import RankFailed, spawn
from gradsync.plan.auto import auto
from gradsync.plan.guard import Guard
from gradsync.plan.paces import accumulate, async_sgd, delayed, diloco, every_step, gossip, local_sgd, nesterov
from gradsync.plan.sync_plan import Plan
from gradsync.planner.profile import ModelProfile
from gradsync.planner.recommend import recommend

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
    """Return the public names; the folders behind them can be imported, and are nobody's interface."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
