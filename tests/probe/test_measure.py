"""All ranks measure together, find the same, and leave nothing behind."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradsync.errors import GradSyncError
from gradsync.kernels.library import load
from gradsync.probe.measure import STAGES, ProbeFindings, measure
from gradsync.probe.pairs import measure_neighbours
from gradsync.probe.probe_group import open_probe_group
from gradsync.transport.host_meeting import declare_host

Run = Callable[..., list[Any]]

CODECS = ["bf16", "fp16", "int8", "int4", "sign", "topk", "randomk", "powersgd"]


def measure_briefly(hosts: str) -> tuple[ProbeFindings, list[str], int, int]:
    """What a rank finds if ranks are on these hosts; the stages it was told; the hosts' pairs; its threads after."""
    torch.set_num_threads(2)
    declare_host(hosts[dist.get_rank()])
    stages: list[str] = []
    try:
        world = dist.group.WORLD
        assert world is not None
        findings = measure(world, brief=True, tick=stages.append)
        with open_probe_group(world, brief=True) as group:
            pairs = measure_neighbours(group) if len(group.hosts) > 1 else []
    finally:
        declare_host(None)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
    return findings, stages, len(pairs), threads


def check_sound(findings: ProbeFindings) -> None:
    device = findings.cluster.device
    assert findings.cluster.calibrated
    assert [speed.kind for speed in device.codecs] == CODECS
    assert all(speed.encode_s > 0 and speed.decode_s > 0 for speed in device.codecs)
    assert [speed.kind for speed in device.codecs if speed.middle_s] == ["powersgd"]
    assert 0 < device.cores <= 2
    for fit in findings.tiers.values():
        assert 0 <= fit.link.load <= 1
        assert math.isfinite(fit.link.spread)
        assert [point.nbytes for point in fit.points] == sorted(point.nbytes for point in fit.points)
        assert all(point.seconds > 0 for point in fit.points)


def test_two_ranks_of_a_host_find_the_same(run: Run) -> None:
    (first, stages, _, threads), (second, *_) = run(measure_briefly, "aa")
    assert first == second
    check_sound(first)
    assert first.cluster.hosts == ((0, 1),)
    assert list(first.tiers) == (["inside", "memory"] if load() else ["inside"])
    assert first.cluster.across == first.cluster.inside  # there is no other
    assert (tuple(stages), threads) == (STAGES, 2)


def test_hosts_of_different_sizes_are_measured_between_and_inside(run: Run) -> None:
    findings, _, pairs, _ = zip(*run(measure_briefly, "abca", ranks=4), strict=True)
    assert findings[1:] == findings[:-1]
    check_sound(findings[0])
    assert findings[0].cluster.hosts == ((0, 3), (1,), (2,))
    assert list(findings[0].tiers) == (["across", "inside", "memory"] if load() else ["across", "inside"])
    assert set(pairs) == {3}


def fail_in_the_middle(culprit: int) -> str:
    def tick(stage: str) -> None:
        if stage == "codecs" and dist.get_rank() == culprit:
            raise ArithmeticError("two and two is five")

    try:
        measure(dist.group.WORLD, brief=True, tick=tick)  # type: ignore[arg-type]
    except (ArithmeticError, GradSyncError) as error:
        return str(error)
    return "nothing"


def test_who_gives_up_ends_the_others_waits(run: Run) -> None:
    said = run(fail_in_the_middle, 1)
    assert said[1] == "two and two is five"
    assert "rank 1" in said[0]


def measure_alone() -> str:
    with pytest.raises(ValueError) as error:
        measure(dist.group.WORLD)  # type: ignore[arg-type]
    return str(error.value)


def test_one_rank_has_no_links(run: Run) -> None:
    assert run(measure_alone, ranks=1) == [
        "there is nothing to measure between the ranks of a group of 1; start at least 2"
    ]
