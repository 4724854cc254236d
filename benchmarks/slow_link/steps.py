"""Part 1: seconds and bytes of a step, over a link of a given rate. All arms take turns in the same two processes.

    ┌─ host0 ──┐   100 Mbit/s each way   ┌─ host1 ──┐
    │  rank 0  ├─ eth0 ═══════════ eth0 ─┤  rank 1  │      a lab of `netlab`: needs root
    └──────────┘                         └──────────┘

    turn of an arm   barrier │ a window of steps, timed │ barrier
    bytes               ├───── what the link counts ───────┤

A sample is the longest of the ranks. What is attached and waits sends only its beats, four a second; they are known
from the turns of the arm that sends nothing, and taken off by the second.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import bench_harness
import gradsync as gs
from gradsync.cli.demo.story.demo_model import DemoShape
from gradsync.cli.local_ranks import advance, rank_folder
from netlab.lab import Lab
from netlab.traffic import payload, sent
from slow_link import data
from slow_link.arms import ARMS, BASE
from slow_link.model import SIZES, build, optimizer_of
from slow_link.replica import Replica

_WARM_UP = 3  # DDP makes its buckets anew after the first step, gradsync after the second
_HOUR_S = 3600.0


class Turn(NamedTuple):
    """Per step, but for `between_s`: from barrier to barrier."""

    step_s: float
    nbytes: float
    between_s: float


def measure(rate: str, arms: list[str], rounds: int) -> dict[str, Any]:
    """Every arm at one rate; `rounds` samples of each."""
    load = os.getloadavg()[0]  # of others, unless we ran a minute ago
    following = rank_folder(_WARM_UP + rounds, f"{len(arms)} arms at {rate}")
    with Lab(hosts=2, rate=None if rate == "none" else rate) as lab, following as folder:
        by_rank = lab.spawn(play, [1, 1], arms, rounds, folder, timeout=10 * _HOUR_S)
    found = {name: _joined([rank["arms"][name] for rank in by_rank]) for name in arms}
    _refuse_if_uncompressed(found, 4 * by_rank[0]["parameters"])
    return {
        "rounds": rounds,
        "parameters": by_rank[0]["parameters"],
        "text": data.read().digest,
        "load_before": round(load, 2),
        "beats_nbytes_per_s": round(max(rank["chatter"] for rank in by_rank)),
        "arms": found,
    }


def _refuse_if_uncompressed(found: dict[str, Any], exact_nbytes: int) -> None:
    """A compressor that is left out without a word would pass for a slow one."""
    compressed = [name for name in found if ARMS[name].compress is not None]
    if idle := [name for name in compressed if found[name]["sent_nbytes"] > 0.75 * exact_nbytes]:
        raise RuntimeError(f"these arms sent {exact_nbytes / 1e6:.1f} MB per step, as without compressor: {idle}")


def _joined(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """A step ends with its last rank; both ranks send equally much."""
    return {
        "claimed_nbytes": round(ranks[0]["claimed_nbytes"]),
        "sent_nbytes": round(median(rank["sent_nbytes"] for rank in ranks)),
        "samples_s": [round(max(same), 5) for same in zip(*(rank["samples_s"] for rank in ranks), strict=True)],
    }


# One rank


def play(arms: list[str], rounds: int, folder: str) -> dict[str, Any]:
    """This rank's seconds and bytes per step, by arm."""
    torch.set_num_threads(1)
    gs.init(timeout=300)
    shape = SIZES["large"]
    replicas = {name: _replica(name, shape) for name in arms}
    turns: dict[str, list[Turn]] = {name: [] for name in arms}
    calls = {name: _turns(replica, ARMS[name].window, shape, turns[name]) for name, replica in replicas.items()}

    def tick() -> None:
        if dist.get_rank() == 0:
            advance(folder)

    bench_harness.interleave(calls, _WARM_UP + rounds, tick)
    kept = {name: taken[_WARM_UP:] for name, taken in turns.items()}
    chatter = _chatter(kept)
    found = {
        name: {
            "claimed_nbytes": float(replica.claimed_nbytes()) / ARMS[name].window,
            "sent_nbytes": max(0.0, median(t.nbytes - chatter * t.between_s / ARMS[name].window for t in kept[name])),
            "samples_s": [turn.step_s for turn in kept[name]],
        }
        for name, replica in replicas.items()
    }
    parameters = sum(p.numel() for p in next(iter(replicas.values())).model.parameters())
    for replica in replicas.values():
        replica.close()
    dist.barrier()
    dist.destroy_process_group()
    return {"arms": found, "parameters": parameters, "chatter": chatter}


def _replica(name: str, shape: DemoShape) -> Replica:
    model = build(shape, seed=0)
    return ARMS[name].make(model, optimizer_of(model))


def _turns(replica: Replica, window: int, shape: DemoShape, turns: list[Turn]) -> Callable[[], float]:
    def turn() -> float:
        batches = [data.batch(shape, 0, len(turns) * window + i, dist.get_rank()) for i in range(window)]
        dist.barrier()
        before, begin = sent(Path("/proc/net/dev").read_text()), time.perf_counter()
        for batch in batches:
            replica.step(batch)
        step_s = (time.perf_counter() - begin) / window
        dist.barrier()  # what this rank sent has left the shaper's queue: the peer has it
        after, end = sent(Path("/proc/net/dev").read_text()), time.perf_counter()
        nbytes = payload(after.nbytes - before.nbytes, after.packets - before.packets)
        turns.append(Turn(step_s, nbytes / window, end - begin))
        return step_s

    return turn


def _chatter(turns: dict[str, list[Turn]]) -> float:
    """Bytes per second that go while no arm sends gradients: beats, and the barriers' few."""
    silent = turns.get(BASE, [])
    return median(turn.nbytes / turn.between_s for turn in silent) if silent else 0.0
