"""Traces of runs that never ran, with chosen faults and seeded noise: every fault's right answer is known."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from gradsync.trace.flight import Flight, Moment
from gradsync.trace.json_lines import to_json
from gradsync.trace.lines import (
    BucketLayout,
    BucketPlan,
    BucketTimes,
    ClockShift,
    Error,
    Health,
    RankEnd,
    RunHeader,
    SocketLine,
    SocketLines,
    Stats,
    StepLine,
    StepPart,
    Value,
)
from gradsync.trace.reader import RankTrace, RunTrace

USUAL = {"optimizer": 0.002, "input": 0.003, "forward": 0.012, "backward": 0.025}  # seconds
NUM_BUCKETS = 4
BUCKET_NBYTES = 1_000_000
LINK = 500e6  # bytes per second
PARAMETERS = [(f"layers.{index}.weight", (250, 500), "float32") for index in range(2 * NUM_BUCKETS)]


@dataclass(frozen=True)
class Noise:
    """How unsteady a machine is; all as shares of a phase's time."""

    jitter: float = 0.0  # of each phase, in each step, on each rank
    machine: float = 0.0  # all ranks alike, drifting over tens of steps
    rank: float = 0.0  # each rank for itself, drifting over tens of steps
    stalls: float = 0.0  # how often a phase takes many times as long
    shared: bool = False  # twice as many ranks as cores: in each step some take turns


QUIET = Noise(jitter=0.02)
NOISY = Noise(jitter=0.1, machine=0.25, rank=0.05, stalls=0.01)
CROWDED = Noise(jitter=0.1, machine=0.25, rank=0.05, stalls=0.005, shared=True)


@dataclass
class _Drift:
    """A factor that wanders about 1 and comes back."""

    rng: random.Random
    spread: float
    value: float = field(init=False)

    def __post_init__(self) -> None:
        self.value = self.rng.gauss(0.0, self.spread)

    def next(self) -> float:
        self.value = 0.97 * self.value + self.rng.gauss(0.0, self.spread * math.sqrt(1 - 0.97**2))
        return math.exp(min(max(self.value, -3 * self.spread), 3 * self.spread))


def made_run(
    ranks: int = 4,
    steps: int = 100,
    seed: int = 0,
    *,
    noise: Noise = QUIET,
    hosts: int = 2,
    slow: Mapping[int, Mapping[str, float]] | None = None,  # rank -> phase (or "encode") -> seconds more
    times: Mapping[int, float] | None = None,  # rank -> how many times as long its computing takes
    slow_links: Mapping[tuple[int, int], float] | None = None,  # (from, to) -> this part of the bandwidth
    ratio: float = 1.0,
    encode_s: float = 0.0,
    overlap: bool = True,
    detailed: bool = True,  # with every bucket and gradient
    health: tuple[Health, ...] = (),
    errors: Mapping[int, Error] | None = None,  # by the rank that raised
    killed: Mapping[int, int] | None = None,  # rank -> the step in which it ended without a word
    stats: Mapping[str, Value] | None = None,
    source: str = "gradsync",
    names: tuple[str, ...] | None = None,  # of the hosts
) -> RunTrace:
    """A run; without noise and faults a step is 42 ms of computing and 2 ms of waiting."""
    rng = random.Random(seed)
    names = names or tuple("abcdefgh"[:hosts])
    made = RunTrace(Path("run"), {rank: _opened(rank, ranks, names, source, ratio) for rank in range(ranks)})
    machine = _Drift(rng, noise.machine)
    drifts = [_Drift(rng, noise.rank) for _ in range(ranks)]
    slow_links = slow_links or {}
    at = 1000.0
    for step in range(1, steps + 1):
        alive = [rank for rank in range(ranks) if step < (killed or {}).get(rank, steps + 1)]
        if len(alive) < ranks or any(step > error.step for error in (errors or {}).values()):
            break
        factor = machine.next()
        turns = rng.sample(range(ranks), ranks // 2) if noise.shared else []
        phases = {}
        for rank in range(ranks):
            own = factor * drifts[rank].next() * (1.0 + (rng.uniform(0.1, 0.8) if rank in turns else 0.0))
            phases[rank] = _phases(rng, noise, own * (times or {}).get(rank, 1.0), (slow or {}).get(rank, {}), step)
        slowest = min(slow_links.values(), default=1.0)
        encoding = {rank: encode_s + (slow or {}).get(rank, {}).get("encode", 0.0) for rank in range(ranks)}
        comm_s = BUCKET_NBYTES / ratio * 2 * (ranks - 1) / ranks / (LINK * slowest) * abs(rng.gauss(1.0, noise.jitter))
        done = _finish(phases, comm_s, overlap)
        for rank in range(ranks):
            trace = made.ranks[rank]
            cell = _step(step, at, rank, phases[rank], done, ratio, encoding[rank], ranks, overlap, source)
            trace.steps.append(cell if detailed else replace(cell, buckets=None, gradients=None, header=None))
            if step % 20 == 0 and ranks > 1 and source == "gradsync":
                trace.socket_lines.append(_sockets(rng, step, rank, ranks, ratio, slow_links))
            if step % 50 == 0 and source == "gradsync":
                trace.stats.append(Stats(step, _stats(trace, ratio, dict(stats or {}))))
        at += done[-1]
    _close(made, health, errors or {}, killed or {}, stats or {})
    return made


def write_run(folder: Path, run: RunTrace) -> Path:
    """The files that such a run would have left."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, trace in run.ranks.items():
        lines = [trace.run, *trace.layouts, *trace.clocks]
        rest = [*trace.steps, *trace.socket_lines, *trace.stats, *trace.health, *trace.errors]
        ordered = sorted(rest, key=lambda line: line.step)
        text = "".join(f"{to_json(line)}\n" for line in [*lines, *ordered, *([trace.end] if trace.end else [])])
        (folder / f"rank-{rank}.jsonl").write_text(text, encoding="utf-8")
        flight = Flight(folder / f"rank-{rank}.flight")
        last = trace.steps[-1].step if trace.steps else 0
        flight.note(last, Moment.AVERAGED)
        flight.note(last + 1, Moment.LEFT if trace.end else Moment.BUCKET_LEFT, -1 if trace.end else 0)
        flight.close()
    return folder


def _opened(rank: int, ranks: int, hosts: tuple[str, ...], source: str, ratio: float) -> RankTrace:
    host = hosts[rank * len(hosts) // ranks]
    run = RunHeader(rank, ranks, host, 4000 + rank, 1763300000.0, 1000.0, source, "cpu", None, list(PARAMETERS))
    trace = RankTrace(run, clocks=[ClockShift(0, 0.0, 1e-5)])
    if source == "gradsync":
        last = 2 * NUM_BUCKETS - 1
        compressor = "int8" if ratio > 1 else None
        trace.layouts.append(
            BucketLayout(
                1,
                [
                    BucketPlan(bucket, [last - 2 * bucket, last - 2 * bucket - 1], BUCKET_NBYTES, compressor)
                    for bucket in range(NUM_BUCKETS)
                ],
            )
        )
    return trace


def _phases(rng: random.Random, noise: Noise, factor: float, more: Mapping[str, float], step: int) -> list[StepPart]:
    phases, at = [], 0.0
    for name, usual in USUAL.items():
        seconds = usual * factor * math.exp(rng.gauss(0.0, noise.jitter))
        if rng.random() < noise.stalls:
            seconds += usual * min(20.0, rng.paretovariate(1.2))
        if step == 1 and name == "forward":
            seconds += 0.5
        seconds += more.get(name, 0.0) * abs(rng.gauss(1.0, 0.1))
        if name == "backward":
            seconds += more.get("encode", 0.0)
        phases.append(StepPart(name, at, at + seconds))
        at += seconds
    return phases


def _ready(phases: list[StepPart], bucket: int, overlap: bool) -> float:
    _, start, stop = phases[-1]
    return stop if not overlap else start + (stop - start) * (bucket + 1) / NUM_BUCKETS


def _finish(phases: Mapping[int, list[StepPart]], comm_s: float, overlap: bool) -> list[float]:
    """When each bucket is everywhere: one after the other, each when the last rank has it."""
    done, before = [], 0.0
    for bucket in range(NUM_BUCKETS):
        before = max(before, *(_ready(each, bucket, overlap) for each in phases.values())) + comm_s
        done.append(before)
    return done


def _step(
    step: int, at: float, rank: int, phases: list[StepPart], done: list[float], ratio: float, encode_s: float,
    ranks: int, overlap: bool, source: str,
) -> StepLine:  # fmt: skip
    own_s, step_s = phases[-1].stop, done[-1]
    buckets, comm_s, end = [], 0.0, 0.0
    nbytes = int(BUCKET_NBYTES / ratio)
    for bucket, over in enumerate(done):
        ready = _ready(phases, bucket, overlap)
        comm_s += max(0.0, over - max(end, ready))
        end = over
        wait = (max(own_s, done[bucket - 1] if bucket else 0.0), max(own_s, over))
        buckets.append(
            BucketTimes(bucket, ready, ready, ready, over, *wait, nbytes, encode_s / NUM_BUCKETS, encode_s / 4)
        )
    if source == "ddp":
        return StepLine(
            step, at, step_s, [*phases, StepPart("wait", own_s, step_s)], step_s - own_s, comm_s, 4 * nbytes
        )
    return StepLine(
        step, at, step_s, [*phases, StepPart("wait", own_s, step_s)], step_s - own_s, comm_s, NUM_BUCKETS * nbytes,
        NUM_BUCKETS * BUCKET_NBYTES, int(NUM_BUCKETS * nbytes * 2 * (ranks - 1) / ranks), encode_s, encode_s / 2,
        buckets=buckets, gradients=[(7 - index, _ready(phases, index // 2, overlap)) for index in range(8)],
        header=(own_s, step_s),
    )  # fmt: skip


def _sockets(
    rng: random.Random, step: int, rank: int, ranks: int, ratio: float, slow: Mapping[tuple[int, int], float]
) -> SocketLines:
    """A ring's, both ways for the acknowledgements of small things; busy in ticks of 4 ms, as kernels count."""
    sockets = []
    for peer in {(rank + 1) % ranks, (rank - 1) % ranks}:
        share = 1.0 if peer == (rank + 1) % ranks else 0.001
        nbytes = int(20 * NUM_BUCKETS * BUCKET_NBYTES / ratio * 2 * (ranks - 1) / ranks * share)
        exact = nbytes / (LINK * slow.get((rank, peer), 1.0)) * rng.uniform(0.7, 1.4)
        busy_s = 0.004 * int(exact / 0.004 + rng.random())
        sockets.append(SocketLine(peer, f"10.0.0.{peer + 1}", nbytes, busy_s, 0.0003, 0))
    return SocketLines(step, sockets)


def _stats(trace: RankTrace, ratio: float, more: dict[str, Value]) -> dict[str, Value]:
    said: dict[str, Value] = {"steps": len(trace.steps), "step_s": trace.steps[-1].step_s, "predicted_step_s": None}
    if ratio > 1:
        said |= {"int8.ratio": ratio, "audit_error": 0.008}
    return said | more


def _close(
    made: RunTrace,
    health: tuple[Health, ...],
    errors: Mapping[int, Error],
    killed: Mapping[int, int],
    stats: Mapping[str, Value],
) -> None:
    for rank, trace in made.ranks.items():
        trace.health.extend(health)
        last = trace.steps[-1].step if trace.steps else 0
        if rank in errors:
            trace.errors.append(errors[rank])
        elif rank not in killed and not errors:
            if trace.run.source == "gradsync":
                trace.stats.append(Stats(last, dict(stats)))
            trace.end = RankEnd(last, "detach")
