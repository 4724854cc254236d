"""A Chrome trace is one that viewers accept: fields, microseconds, order and nesting, whatever the run held."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gradsync.report.exporters.perfetto import events, write_perfetto
from gradsync.trace.lines import BucketTimes, ClockShift, Error, Health, StepLine, StepPart
from gradsync.trace.reader import RankTrace, RunTrace
from made_runs import NOISY, made_run

Event = dict[str, Any]


def written(run: RunTrace, folder: Path) -> list[Event]:
    path = folder / "trace.json"
    count = write_perfetto(run, path)
    content = json.loads(path.read_text())
    assert list(folder.iterdir()) == [path]
    assert content["displayTimeUnit"] == "ms"
    assert len(content["traceEvents"]) == count
    return list(content["traceEvents"])


def check(found: list[Event]) -> None:
    """What the format asks for, and that slices of a thread come in order and nest."""
    threads: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in found:
        assert event["ph"] in ("X", "M", "i", "C")
        assert isinstance(event["name"], str)
        assert event["pid"] > 0
        assert event["tid"] > 0
        if event["ph"] != "M":
            assert isinstance(event["ts"], int)
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            threads[event["pid"], event["tid"]].append(event)
    for slices in threads.values():
        assert all(a["ts"] <= b["ts"] for a, b in pairwise(slices))
        open_ends: list[int] = []
        for each in slices:
            while open_ends and open_ends[-1] <= each["ts"]:
                open_ends.pop()
            assert not open_ends or each["ts"] + each["dur"] <= open_ends[-1]
            open_ends.append(each["ts"] + each["dur"])


def slices(found: list[Event], name: str, rank: int | None = None) -> list[Event]:
    return [e for e in found if e["ph"] == "X" and e["name"] == name and rank in (None, e["pid"] - 1)]


def thread_names(found: list[Event], rank: int) -> set[str]:
    return {e["args"]["name"] for e in found if e["name"] == "thread_name" and e["pid"] == rank + 1}


def test_ranks_are_processes_and_their_work_threads(tmp_path: Path) -> None:
    found = written(made_run(ranks=3, steps=5), tmp_path)
    check(found)
    names = [e["args"]["name"] for e in found if e["name"] == "process_name"]
    assert names == ["rank 0 (host a)", "rank 1 (host a)", "rank 2 (host b)"]
    assert {"compute", "waiting", "communication"} <= thread_names(found, 1)
    assert len(slices(found, "step 4")) == 3
    assert len(slices(found, "forward", rank=2)) == 5
    [bucket] = slices(found, "bucket 1", rank=2)[1:2]
    assert bucket["args"]["nbytes"] == 1_000_000
    assert bucket["args"]["parameters"] == "layers.5.weight, layers.4.weight"


def test_times_are_those_of_the_trace_in_microseconds() -> None:
    run = made_run(ranks=2, steps=3)
    begun = run.ranks[0].steps[0].at
    found = list(events(run))
    for step, slice_ in zip(run.ranks[1].steps, slices(found, "backward", rank=1), strict=True):
        phase = next(phase for phase in step.phases if phase.name == "backward")
        assert slice_["ts"] == pytest.approx(1e6 * (step.at + phase.start - begun), abs=1)
        assert slice_["dur"] == pytest.approx(1e6 * phase.seconds, abs=2)


def test_hosts_are_on_one_clock() -> None:
    run = made_run(ranks=2, steps=3)
    other = run.ranks[1]
    other.steps = [replace(step, at=step.at - 500.0) for step in other.steps]
    other.clocks = [ClockShift(0, 500.0, 1e-4)]
    found = list(events(run))
    for step in (1, 2, 3):
        here, there = slices(found, f"step {step}")
        assert here["ts"] == there["ts"]


def test_without_clock_lines_hosts_are_aligned_by_their_wall_clocks() -> None:
    run = made_run(ranks=2, steps=2)
    other = run.ranks[1]
    other.run = replace(other.run, clock=other.run.clock - 500.0)
    other.steps = [replace(step, at=step.at - 500.0) for step in other.steps]
    for trace in run.ranks.values():
        trace.clocks = []
    here, there = slices(list(events(run)), "step 1")
    assert here["ts"] == there["ts"]


def test_buckets_under_way_at_once_get_threads_of_their_own() -> None:
    run = made_run(ranks=2, steps=1)
    [step] = run.ranks[0].steps
    times = [BucketTimes(i, 0.0, 0.001 * i, None, 0.01, None, None, 8, 0.0, 0.0) for i in range(3)]
    run.ranks[0].steps = [replace(step, buckets=times)]
    found = list(events(run))
    check(found)
    assert {"communication", "communication 2", "communication 3"} <= thread_names(found, 0)
    assert len({e["tid"] for i in range(3) for e in slices(found, f"bucket {i}", rank=0)}) == 3


def test_errors_and_health_are_marked_in_their_rank() -> None:
    bad = Health(3, "nonfinite", [1], "layers.0.weight", 2, "rank 1 has 2 NaN in layers.0.weight")
    run = made_run(ranks=2, steps=5, health=(bad,), errors={0: Error(5, "PeerLost", [1], 0, "rank 1 died")})
    found = list(events(run))
    check(found)
    marks = [e for e in found if e["ph"] == "i"]
    assert [(e["pid"] - 1, e["name"]) for e in marks] == [
        (0, "health: nonfinite"),
        (0, "error: PeerLost"),
        (1, "health: nonfinite"),
    ]
    assert marks[1]["args"]["text"] == "rank 1 died"
    assert marks[0]["ts"] <= marks[1]["ts"]


def test_any_run_gives_a_valid_trace(tmp_path: Path) -> None:
    for seed in range(20):
        run = made_run(ranks=1 + seed % 4, steps=8, seed=seed, noise=NOISY, ratio=1.0 + seed % 2, encode_s=0.002)
        check(written(run, tmp_path))


def garbage(rng: random.Random, trace: RankTrace) -> list[StepLine]:
    """Steps whose times mean nothing."""

    def time() -> float:
        return rng.choice([0.0, -1.0, 1e-7, 1e12, rng.uniform(-5, 5)])

    steps = []
    for _ in range(12):
        phases = [StepPart(rng.choice(["wait", "input", "\x1b</script>"]), time(), time()) for _ in range(4)]
        buckets = [
            BucketTimes(rng.randrange(9), *(rng.choice([None, time()]) for _ in range(6)), 1, abs(time()), 0.0)
            for _ in range(4)
        ]
        steps.append(StepLine(rng.randrange(-2, 9), time(), time(), phases, buckets=buckets))
    return steps


def test_nonsense_in_a_trace_still_gives_a_valid_one(tmp_path: Path) -> None:
    for seed in range(50):
        rng = random.Random(seed)
        run = made_run(ranks=2, steps=2, seed=seed)
        run.ranks[0].steps += garbage(rng, run.ranks[0])
        run.ranks[1].steps = garbage(rng, run.ranks[1])
        check(written(run, tmp_path))


def test_hostile_names_are_only_text(tmp_path: Path) -> None:
    run = made_run(ranks=1, steps=2, names=('"}],\n\x1b[31m</script>\ud800' + 5000 * "x",))
    [name] = [e["args"]["name"] for e in written(run, tmp_path) if e["name"] == "process_name"]
    assert name.isprintable()
    assert len(name) < 300


def test_a_run_without_steps_is_a_valid_trace(tmp_path: Path) -> None:
    found = written(made_run(ranks=2, steps=0, errors={0: Error(1, "PeerLost", [1], None, "gone")}), tmp_path)
    check(found)
    assert [e["name"] for e in found if e["ph"] == "i"] == ["error: PeerLost"]
