"""The simulation of a step: laws of any schedule, and the closed formulas of the field."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.planner.simulation import ComputeTimes, SimulatedBucket, end_s, fair_speeds, simulate
from gradsync.planner.stages import Stage

NOTHING = Stage(0.0, 0.0, True)
seconds = st.floats(0.0, 1.0)


def wire(duration: float, load: float = 0.0) -> Stage:
    return Stage(duration, load, True)


def code(duration: float) -> Stage:
    return Stage(duration, 1.0, False)


@st.composite
def steps(draw: st.DrawFn) -> tuple[ComputeTimes, list[SimulatedBucket]]:
    compute = ComputeTimes(draw(seconds), draw(st.floats(0.01, 1.0)), draw(seconds))
    ready = sorted(draw(st.lists(st.floats(0.0, compute.backward_s), min_size=1, max_size=6)))
    kinds = st.sampled_from(["plain", "one round", "two rounds"])
    buckets = []
    for number, at in enumerate(ready):
        a, b, c = draw(seconds), draw(seconds), draw(seconds)
        stages = {
            "plain": [wire(a)],
            "one round": [code(b), wire(a), code(c)],
            "two rounds": [code(b), wire(a), code(c), wire(b), code(a)],
        }[draw(kinds)]
        buckets.append(SimulatedBucket(f"bucket {number}", at, stages))
    return compute, buckets


def total(buckets: list[SimulatedBucket], on_wire: bool) -> float:
    return sum(stage.seconds for bucket in buckets for stage in bucket.stages if stage.on_wire == on_wire)


@given(steps(), st.sampled_from([0.5, 1.0, 2.0]), st.booleans())
def test_a_step_is_never_shorter_than_its_parts_nor_longer_than_all_of_them(
    step: tuple[ComputeTimes, list[SimulatedBucket]], cores: float, overlap: bool
) -> None:
    compute, buckets = step
    took = end_s(simulate(compute, buckets, NOTHING, cores, overlap))
    work, wires, codes = sum(compute[:3]), total(buckets, True), total(buckets, False)
    assert took >= max(work, wires, (work + codes) / cores if cores <= 1 else 0.0) - 1e-9
    assert took <= (work + codes) / min(1.0, cores) + wires + 1e-9


@given(steps())
def test_overlap_never_makes_a_step_longer_where_cores_are_plenty(
    step: tuple[ComputeTimes, list[SimulatedBucket]],
) -> None:
    compute, buckets = step
    overlapped, after = (end_s(simulate(compute, buckets, NOTHING, 8.0, overlap)) for overlap in (True, False))
    assert overlapped <= after + 1e-9


@given(st.floats(0.01, 1.0), st.floats(0.0, 3.0), st.integers(1, 40))
def test_equal_buckets_take_what_the_formula_says(backward_s: float, wires_s: float, k: int) -> None:
    """T = T_c + max(0, C − last − T_b) + last in the fluid limit; exactly, for k buckets at even times:"""
    each = wires_s / k
    buckets = [SimulatedBucket(str(i), backward_s * (i + 1) / k, [wire(each)]) for i in range(k)]
    took = end_s(simulate(ComputeTimes(0.5, backward_s, 0.1), buckets, NOTHING, 2.0, True))
    first = backward_s / k
    expected = 0.6 + max(backward_s + each, first + wires_s)
    assert took == pytest.approx(expected)


@given(st.floats(0.0, 2.0))
def test_without_overlap_everything_follows_backward(wires_s: float) -> None:
    buckets = [SimulatedBucket("a", 0.1, [wire(wires_s / 2)]), SimulatedBucket("b", 0.3, [wire(wires_s / 2)])]
    assert end_s(simulate(ComputeTimes(0.2, 0.4, 0.1), buckets, NOTHING, 1.0, False)) == pytest.approx(0.7 + wires_s)


def test_a_busy_wire_slows_computation_by_its_load() -> None:
    buckets = [SimulatedBucket("a", 0.0, [wire(0.5, load=0.2)])]
    assert end_s(simulate(ComputeTimes(0.0, 1.0, 0.0), buckets, NOTHING, 1.0, True)) == pytest.approx(1.1)
    assert end_s(simulate(ComputeTimes(0.0, 1.0, 0.0), buckets, NOTHING, 1.2, True)) == pytest.approx(1.0)


def test_coding_takes_time_from_computation_where_there_is_one_core() -> None:
    buckets = [SimulatedBucket("a", 0.0, [code(0.3), wire(0.1), code(0.2)])]
    assert end_s(simulate(ComputeTimes(0.0, 1.0, 0.0), buckets, NOTHING, 1.0, True)) == pytest.approx(1.5)
    # With two, decoding still waits for the pipeline's next turn, which here is the end of backward.
    assert end_s(simulate(ComputeTimes(0.0, 1.0, 0.0), buckets, NOTHING, 2.0, True)) == pytest.approx(1.2)


def test_the_second_round_of_a_bucket_follows_the_first_of_the_next() -> None:
    two = [code(0.1), wire(0.2), code(0.1), wire(0.2), code(0.1)]
    spans = simulate(
        ComputeTimes(0.0, 1.0, 0.0),
        [SimulatedBucket("a", 0.0, two), SimulatedBucket("b", 0.5, two)],
        NOTHING,
        8.0,
        True,
    )
    sent = [span.label for span in spans if span.track == "wire"]
    assert sent == ["a", "b", "a", "b"]


def test_what_happens_while_computation_waits_is_marked() -> None:
    buckets = [SimulatedBucket("a", 0.1, [wire(0.2)]), SimulatedBucket("b", 0.5, [wire(0.3)])]
    spans = simulate(ComputeTimes(0.0, 0.5, 0.1), buckets, NOTHING, 1.0, True)
    assert {span.label: span.exposed for span in spans if span.track == "wire"} == {"a": False, "b": True}


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4), st.floats(0.1, 4.0))
def test_shares_are_fair(loads: list[float], cores: float) -> None:
    speeds = fair_speeds(loads, cores)
    used = sum(load * speed for load, speed in zip(loads, speeds, strict=True))
    assert used <= cores + 1e-9
    assert all(0 < speed <= 1 for speed in speeds)
    if sum(loads) <= cores:
        assert speeds == pytest.approx([1.0] * len(loads))


@given(steps())
def test_a_host_that_is_far_ahead_changes_nothing(step: tuple[ComputeTimes, list[SimulatedBucket]]) -> None:
    """Of buckets that are not coded: of others, two may want the wire at one moment, and either may have it first."""
    compute, buckets = step[0], [bucket._replace(stages=[wire(total([bucket], True))]) for bucket in step[1]]
    alone, with_host = (
        end_s(simulate(compute._replace(host_share=share), buckets, NOTHING, 1.0, True, on_stream=True))
        for share in (0.0, 1e-9)
    )
    assert with_host == pytest.approx(alone, rel=1e-6)


@given(steps(), st.floats(1.0, 5.0), seconds)
def test_where_the_host_is_slow_a_step_takes_what_it_issues(
    step: tuple[ComputeTimes, list[SimulatedBucket]], share: float, issues_s: float
) -> None:
    """Nothing is on the wire or coded then: what the GPU does is hidden behind its host."""
    compute, buckets = step
    issued = [bucket._replace(stages=[Stage(0.0, 0.0, True, host_s=issues_s)]) for bucket in buckets]
    took = end_s(simulate(compute._replace(host_share=share), issued, NOTHING, 1.0, True, on_stream=True))
    work = share * sum(compute[:3]) + issues_s * len(buckets)
    # The last part of the GPU's own work may come after the host's: no longer than the optimizer.
    assert work - 1e-9 <= took <= work + compute.optimizer_s + 1e-9
