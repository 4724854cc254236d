"""Sweeps over bandwidth, ranks and batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planned import Capture, say, tiny_profile, wired

from gradsync.cli.plan.answer import Answer, answer
from gradsync.cli.plan.sweep import Axis, parse_axis, sweep


@pytest.fixture(scope="module")
def slow() -> Answer:
    return answer(tiny_profile(), wired(10e6))


def test_a_sweep_goes_by_powers_of_two() -> None:
    assert list(parse_axis("gpus=8..64").points()) == [8, 16, 32, 64]
    assert list(parse_axis("tokens=1k..3k").points()) == [1000, 2000, 3000]
    assert parse_axis("bandwidth=1gbit..400gbit").high == 50e9


def test_overhead_falls_with_bandwidth_and_batch_and_rises_with_ranks(slow: Answer) -> None:
    for axis, sign in ((Axis("bandwidth", 1e6, 1e9), -1), (Axis("tokens", 100, 1e5), -1), (Axis("gpus", 2, 16), 1)):
        points = sweep(axis, slow)
        overheads = [sign * point.usual.overhead for point in points]
        assert overheads == sorted(overheads)
        assert all(point.best.step_s <= point.same.step_s * 1.016 <= point.usual.step_s * 1.04 for point in points)


def test_beyond_what_was_probed_is_an_extrapolation(slow: Answer) -> None:
    probed = [point.extrapolated for point in sweep(Axis("gpus", 2, 8), slow)]
    assert probed == [False, True, True]
    catalogued = replace(slow, cluster=replace(slow.cluster, calibrated=False))
    assert [p.extrapolated for p in sweep(Axis("gpus", 1024, 4096), catalogued)] == [False, True, True]


def test_a_hundred_thousand_gpus_are_priced_and_labelled(capsys: Capture) -> None:
    arguments = ["--gpus", "100000", "--network", "ndr", "--nics", "8", "--params", "1e8"]
    told = say(capsys, *arguments, "--sweep", "gpus=25000..100000")
    assert "extrapolation" in told
    assert "100,000" in told
    assert "goodput" in told
