"""The one table of all-reduces that a bench can run, and which of them it runs.

peers      gloo, and MPI where it is installed; on GPUs NCCL: always there, so that every number has its neighbour
gradsync   what --algorithms names
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from gradsync.algorithms.builtin import shared_memory
from gradsync.algorithms.price import Algorithm
from gradsync.exchange.all_reduce import all_reduce
from gradsync.plan.sync_plan import ALGORITHMS

Call = Callable[[], object]

GLOO, MPI, NCCL = "gloo", "mpi", "nccl"
_ONE_HOST = ("shared", "any")
_SEVERAL_HOSTS = ("hierarchical", "ring", "auto")
_GPUS = ("auto", "ring")
_HOST_MEMORY = (GLOO, MPI, *_ONE_HOST)
ALIASES = {"shared_memory": _ONE_HOST}

# What mpi4py knows by itself of the types that numpy has.
MPI_DTYPES = ("fp32", "fp64", "int32", "int64")


@dataclass(frozen=True)
class AllReduceVariant:
    """One all-reduce. `bind` prepares the call that replaces a tensor by its sum over the ranks."""

    algorithm: str
    says: str
    bind: Callable[[torch.Tensor], Call]
    shared: bool = False  # works on a tensor in the memory that the ranks of a host share


def _gradsync(name: str, recipe: Algorithm | None, says: str, shared: bool = False) -> AllReduceVariant:
    """An arm that is gradsync's own."""

    def bind(tensor: torch.Tensor) -> Call:
        return partial(all_reduce, tensor, algorithm=recipe, op="sum")

    return AllReduceVariant(name, says, bind, shared)


def _bind_backend(tensor: torch.Tensor) -> Call:
    return partial(dist.all_reduce, tensor)


def _bind_mpi(tensor: torch.Tensor) -> Call:
    mpi: Any = import_module("mpi4py.MPI")
    return partial(mpi.COMM_WORLD.Allreduce, mpi.IN_PLACE, tensor.numpy())


VARIANTS: Mapping[str, AllReduceVariant] = {
    GLOO: AllReduceVariant(GLOO, "the process group's own dist.all_reduce", _bind_backend),
    MPI: AllReduceVariant(MPI, "MPI_Allreduce in place, by mpi4py", _bind_mpi),
    "shared": _gradsync("shared_memory", shared_memory(), "gs.shared_memory() on a tensor of gs.shared_empty()", True),
    "any": _gradsync("shared_memory", shared_memory(), "gs.shared_memory() on a plain tensor"),
    "auto": _gradsync("auto", None, "gs.all_reduce() as it comes: gradsync chooses"),
    **{name: _gradsync(name, kind(), f"gs.{name}()") for name, kind in ALGORITHMS.items() if name not in ALIASES},
    NCCL: AllReduceVariant(NCCL, "the process group's own dist.all_reduce, on GPUs", _bind_backend),
}


def parse_variants(text: str) -> tuple[str, ...]:
    """The arms that a list names.

    >>> parse_variants("ring,shared_memory")
    ('ring', 'shared', 'any')
    """
    if text == "all":
        return tuple(VARIANTS)
    names: list[str] = []
    for name in text.split(","):
        if name.strip() not in {*VARIANTS, *ALIASES}:
            raise ValueError(
                f"{name.strip()!r} is no algorithm: choose from {', '.join([*VARIANTS, *ALIASES])}, or all"
            )
        names += ALIASES.get(name.strip(), (name.strip(),))
    return tuple(dict.fromkeys(names))


def choose_variants(named: tuple[str, ...] | None, one_host: bool, mpi: bool, gpus: bool = False) -> tuple[str, ...]:
    """The peers first, then the arms named, or those that suit the hosts.

    >>> choose_variants(None, one_host=True, mpi=False), choose_variants(("tree",), one_host=True, mpi=True)
    (('gloo', 'shared', 'any'), ('gloo', 'mpi', 'tree'))
    """
    if named is None:
        named = _GPUS if gpus else _ONE_HOST if one_host else _SEVERAL_HOSTS
    elif set(named) == set(VARIANTS):  # all that there are
        unfit = _HOST_MEMORY if gpus else () if one_host else _ONE_HOST
        named = tuple(name for name in named if name not in unfit)
    peers = (NCCL,) if gpus else (GLOO, MPI) if mpi else (GLOO,)
    return (*peers, *(name for name in named if name not in (GLOO, MPI, NCCL)))


def misplaced(named: tuple[str, ...] | None, gpus: bool) -> str | None:
    """The first of the arms named that is not for tensors on GPUs, or only for these.

    >>> misplaced(("ring", "shared"), gpus=True), misplaced(("ring", "nccl"), gpus=False), misplaced(None, gpus=True)
    ('shared', 'nccl', None)
    """
    if named is None or set(named) == set(VARIANTS):
        return None
    return next((name for name in named if name in (_HOST_MEMORY if gpus else (NCCL,))), None)


def one_host_only(arms: tuple[str, ...]) -> list[str]:
    """The arms that need all ranks on one host."""
    return [name for name in arms if name in _ONE_HOST]
