"""Part 2: seconds and bytes of a step over a slow link. All arms take turns in the same two processes.

    ┌─ host0 ──┐   100 Mbit/s each way   ┌─ host1 ──┐
    │  rank 0  ├─ eth0 ═══════════ eth0 ─┤  rank 1  │      a lab of `netlab`: needs root
    └──────────┘                         └──────────┘

    turn of an arm   barrier │ whole windows of steps │ until the link is silent │ barrier
    seconds                  ├───────────────────────────────────────┤
    bytes                    ├──────── what the link counts ───────────────────────────┤

To the last byte, not to the last step: `delayed` and `async_sgd` go on while their last bytes still travel, and a short
turn would be given them for nothing. A sample is the longest of the ranks. What is attached and waits sends only its
beats; they are known from the turns of the arm that sends nothing, and taken off by the second.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import bench_harness
import gradsync as gs
from gradsync.cli.local_ranks import advance, rank_folder
from netlab.lab import Lab
from netlab.traffic import payload, sent
from pace.arms import ARMS, BASE, NUM_RANKS, SHAPE
from slow_link import data
from slow_link.model import build, optimizer_of
from slow_link.replica import Replica

_WARM_UP = 1  # rounds: DDP makes its buckets anew after the first step, compressors begin after an exact exchange
_QUIET_S, _QUIET_NBYTES = 0.05, 16384  # the link is silent when it sends less in this time; beats are a few hundred
_TIMEOUT_S = 3600.0


class Turn(NamedTuple):
    """Per step, but for `between_s`: from barrier to barrier."""

    step_s: float
    nbytes: float
    between_s: float


def measure(rate: str, arms: list[str], rounds: int) -> dict[str, Any]:
    """Every arm at one rate; `rounds` samples of each."""
    load = os.getloadavg()[0]  # of others, unless we ran a minute ago
    following = rank_folder((_WARM_UP + rounds) * len(arms), f"{len(arms)} arms at {rate}, turn")
    with Lab(hosts=NUM_RANKS, rate=None if rate == "none" else rate) as lab, following as folder:
        by_rank = lab.spawn(play, 1, arms, rounds, folder, timeout=_TIMEOUT_S)
    for arm, why in by_rank[0]["missing"].items():
        print(f"{arm}: not made, {why}", file=sys.stderr, flush=True)
    return {
        "rounds": rounds,
        "parameters": sum(parameter.numel() for parameter in build(SHAPE, 0).parameters()),
        "load_before": round(load, 2),
        "beats_nbytes_per_s": round(max(rank["chatter"] for rank in by_rank)),
        "arms": {arm: _joined([rank["arms"][arm] for rank in by_rank]) for arm in by_rank[0]["arms"]},
    }


def _joined(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """A turn ends with its last rank."""
    return {
        "sent_nbytes": round(mean(rank["sent_nbytes"] for rank in ranks)),
        "samples_s": [round(max(same), 5) for same in zip(*(rank["samples_s"] for rank in ranks), strict=True)],
    }


# One rank


def play(arms: list[str], rounds: int, folder: str) -> dict[str, Any]:
    """This rank's seconds and bytes per step, by arm; and the arms that could not be made."""
    torch.set_num_threads(1)
    gs.init(timeout=300)
    replicas: dict[str, Replica] = {}
    missing: dict[str, str] = {}
    for name in arms:
        model = build(SHAPE, seed=0)
        try:
            replicas[name] = ARMS[name].make(model, optimizer_of(model))
        except Exception as error:  # a pace that is not there: all ranks find the same
            missing[name] = f"{type(error).__name__}: {error}"
    turns: dict[str, list[Turn]] = {name: [] for name in replicas}
    calls = {name: _turns(replica, ARMS[name].turn, turns[name], folder) for name, replica in replicas.items()}
    bench_harness.interleave(calls, _WARM_UP + rounds)
    kept = {name: taken[_WARM_UP:] for name, taken in turns.items()}
    chatter = _chatter(kept)
    for replica in replicas.values():
        replica.close()
    dist.barrier()
    dist.destroy_process_group()
    found = {name: _summary(taken, ARMS[name].turn, chatter) for name, taken in kept.items()}
    return {"arms": found, "missing": missing, "chatter": chatter}


def _summary(turns: list[Turn], num_steps: int, chatter: float) -> dict[str, Any]:
    return {
        "sent_nbytes": max(0.0, median(turn.nbytes - chatter * turn.between_s / num_steps for turn in turns)),
        "samples_s": [turn.step_s for turn in turns],
    }


def _turns(replica: Replica, num_steps: int, turns: list[Turn], folder: str) -> Callable[[], float]:
    def turn() -> float:
        rank = dist.get_rank()
        batches = [data.batch(SHAPE, 0, len(turns) * num_steps + i, rank) for i in range(num_steps)]
        dist.barrier()
        before, begin = _sent(), time.perf_counter()
        for batch in batches:
            replica.step(batch)
        step_s = (_silent_since() - begin) / num_steps
        dist.barrier()
        after, end = _sent(), time.perf_counter()
        turns.append(Turn(step_s, (after - before) / num_steps, end - begin))
        if rank == 0:
            advance(folder)
        return step_s

    return turn


def _sent() -> int:
    return payload(*sent(Path("/proc/net/dev").read_text()))


def _silent_since() -> float:
    """When this rank's end of the link fell silent; now, if it is."""
    since, seen = time.perf_counter(), _sent()
    while time.perf_counter() - since < _QUIET_S:
        time.sleep(0.002)
        now = _sent()
        if now - seen > _QUIET_NBYTES:
            since, seen = time.perf_counter(), now
    return since


def _chatter(turns: dict[str, list[Turn]]) -> float:
    """Bytes per second that go while no arm sends: beats, and the barriers' few."""
    silent, num_steps = turns.get(BASE, []), ARMS[BASE].turn
    return median(turn.nbytes * num_steps / turn.between_s for turn in silent) if silent else 0.0
