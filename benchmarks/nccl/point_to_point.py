"""In a rank: one tensor summed by each algorithm, between 2, 3 and 4 ranks, and 4 that count as two hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import gradsync as gs
from gradsync.transport.host_meeting import declare_host
from nccl.crew import Crew, Measured
from nccl.turns import Samples, medians, take_turns

SIZES_MB = (1, 25, 100)
NCCL = "NCCL itself"
ALGORITHMS: dict[str, Callable[[], Any]] = {
    "native": gs.native,
    "ring": gs.ring,
    "tree": gs.tree,
    "halving_doubling": gs.halving_doubling,
    "hierarchical": gs.hierarchical,
}
_CALLS = {1: 10, 25: 4, 100: 2}
_ROUNDS = 5
_DRY_NUMEL = 1024


def point_to_point(crew: Crew, job: dict[str, Any]) -> None:
    """Every rank calls this; those that are not in a group wait."""
    for ranks in range(2, crew.size + 1):
        _measure(crew, f"{ranks} ranks", ranks)
    if crew.size >= 4:
        declare_host(f"host{crew.rank // 2}")
        _measure(crew, f"{crew.size} ranks as 2 hosts", crew.size)


def _measure(crew: Crew, where: str, ranks: int) -> None:
    group = dist.new_group(list(range(ranks)))
    takes_part = crew.rank < ranks
    for size_mb in SIZES_MB:
        numel = _DRY_NUMEL if crew.dry else size_mb * 250_000
        tensor = torch.ones(numel, device=crew.device)
        failed: dict[str, str] = {}
        turns: dict[str, Callable[[], Measured]] = {}
        for name in (NCCL, *ALGORITHMS):
            if crew.over():
                failed[name] = "no time was left"
                continue
            call, problem = _call(name, tensor, group), ""
            try:
                if takes_part:
                    call()
                    crew.settle()
            except Exception as error:  # an algorithm less, and why
                problem = f"{type(error).__name__}: {str(error)[:400]}"
            if problem := crew.agree(problem):
                failed[name] = problem
                crew.note(f"{where}, {size_mb} MB, {name} left out: {problem}")
                continue
            turns[name] = _turn(crew, call, _CALLS[size_mb], takes_part)

        def tell(samples: Samples, size_mb: int = size_mb, failed: dict[str, str] = failed) -> None:
            complete = all(len(each["wall_s"]) == _ROUNDS for each in samples.values())
            facts = {"samples": samples, "medians": medians(samples), "failed": failed}
            crew.say(f"{where} | {size_mb} MB", ranks=ranks, size_mb=size_mb, complete=complete, **facts)

        take_turns(crew, turns, _ROUNDS, failed, tell)


def _call(name: str, tensor: torch.Tensor, group: Any) -> Callable[[], object]:
    if name == NCCL:
        return lambda: dist.all_reduce(tensor, dist.ReduceOp.SUM, group=group)
    algorithm = ALGORITHMS[name]()
    return lambda: gs.all_reduce(tensor, algorithm=algorithm, group=group)


def _turn(crew: Crew, call: Callable[[], object], times: int, takes_part: bool) -> Callable[[], Measured]:
    return lambda: crew.timed(call, times, takes_part)
