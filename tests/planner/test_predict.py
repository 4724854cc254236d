"""Laws of a prediction, whatever the model, the links and the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_plans import cluster_of, profile_of

import gradsync as gs
from gradsync.cluster import Device, Link
from gradsync.plan.sync_plan import Plan
from gradsync.planner.collective import Collectives
from gradsync.planner.predict import lay_out, memory_nbytes, predict, quality

PLANS = [
    Plan(),
    Plan(overlap="none"),
    Plan(bucket_bytes=1 << 20),
    Plan(compress=gs.bf16()),
    Plan(compress=gs.int8()),
    Plan(compress=gs.powersgd(4)),
    Plan(compress=gs.across_hosts(gs.int4())),
    Plan(pace=gs.accumulate(4)),
    Plan(pace=gs.local_sgd(8)),
    Plan(pace=gs.diloco(8)),
    Plan(pace=gs.diloco(8, fragments=2, delay=1)),
    Plan(pace=gs.delayed(1)),
    Plan(pace=gs.async_sgd(4)),
    Plan(pace=gs.gossip()),
]
plans = pytest.mark.parametrize("plan", PLANS, ids=lambda plan: str(plan.canonical())[:60])


@plans
@given(st.floats(1e6, 1e11), st.sampled_from([(2, 1), (3, 1), (2, 4), (1, 2)]), st.sampled_from([0.6, 1.0, 2.0]))
def test_a_step_is_at_least_its_computation_and_lies_in_its_interval(
    plan: Plan, bandwidth: float, shape: tuple[int, int], cores: float
) -> None:
    profile = profile_of(num_layers=3)
    found = predict(profile, cluster_of(bandwidth, *shape, device=Device(cores=cores)), plan)
    assert found.step_s >= found.compute_s * (1 - 1e-9)
    assert found.low_s <= found.step_s <= found.high_s
    assert 0 <= found.overhead < 1
    assert found.exposed_s == pytest.approx(found.step_s - found.compute_s, abs=1e-12)


@plans
def test_more_bandwidth_never_makes_it_slower(plan: Plan) -> None:
    steps = [predict(profile_of(), cluster_of(bandwidth), plan).step_s for bandwidth in (1e6, 1e7, 1e8, 1e9, 1e10)]
    assert steps == pytest.approx(sorted(steps, reverse=True))


@plans
def test_more_jitter_never_makes_it_faster(plan: Plan) -> None:
    cluster = cluster_of(1e8, num_hosts=8)
    steps = [predict(profile_of(jitter=jitter), cluster, plan).step_s for jitter in (0.0, 0.05, 0.2)]
    assert steps == pytest.approx(sorted(steps))


@plans
def test_one_rank_alone_only_computes(plan: Plan) -> None:
    alone = cluster_of(1e8, num_hosts=1)
    found = predict(profile_of(), alone, plan)
    assert found.nbytes == found.memory_nbytes == 0
    if not isinstance(plan.pace, type(gs.diloco(8))):  # whose outer step is there also alone
        assert found.step_s == pytest.approx(found.compute_s)


def test_three_ranks_on_two_cores_compute_half_as_long_again() -> None:
    fast = cluster_of(1e12, num_hosts=3, device=Device(cores=2 / 3, call_s=0.0, memory_bandwidth=1e15))
    found = predict(profile_of(), replace(fast, across=Link(0.0, 1e12)), Plan())
    assert found.compute_s == pytest.approx(1.5 * profile_of().compute_s)
    assert found.step_s == pytest.approx(found.compute_s, rel=5e-3)


def test_the_wire_of_a_slow_link_is_what_is_waited_for() -> None:
    """2(n−1)/n of the bytes, whatever else: 8 MiB at 1 MB/s between two ranks."""
    found = predict(profile_of(), cluster_of(1e6), Plan(overlap="none"))
    assert found.exposed_s == pytest.approx(8 * (1 << 20) / 1e6, rel=0.01)
    assert found.nbytes == 8 << 20


def test_accumulating_spreads_the_exchange_over_its_micro_batches() -> None:
    once, spread = (predict(profile_of(), cluster_of(1e6), plan) for plan in (Plan(), Plan(pace=gs.accumulate(4))))
    assert spread.exposed_s == pytest.approx(once.exposed_s / 4, rel=0.02)
    assert spread.nbytes == pytest.approx(once.nbytes / 4)


def test_delayed_hides_what_fits_into_a_step() -> None:
    profile, cluster = profile_of(), cluster_of(100e6, device=Device(memory_bandwidth=1e15))  # 84 ms of 128
    assert predict(profile, cluster, Plan(pace=gs.delayed(1))).exposed_s < 0.002
    assert predict(profile, cluster, Plan()).exposed_s > 0.01


def test_buckets_are_the_engines() -> None:
    """Cut at the limit in the order of backward, as `engine.bucket` does."""
    buckets = lay_out(profile_of(8), Plan(bucket_bytes=2 << 20), Collectives(cluster_of(1e9)))
    assert [bucket.ready_s for bucket in buckets] == pytest.approx([0.02, 0.04, 0.06, 0.08])


def test_very_many_buckets_are_played_in_fewer() -> None:
    profile = profile_of(num_layers=1000, side=16)
    few = lay_out(profile, Plan(bucket_bytes=1024), Collectives(cluster_of(1e9)))
    assert len(few) <= 32
    total = sum(stage.nbytes for bucket in few for stage in bucket.stages)
    assert total == pytest.approx(profile.nbytes)


def test_quality_is_named() -> None:
    names = [quality(plan) for plan in (Plan(), Plan(compress=gs.bf16()), Plan(compress=gs.int8()))]
    assert names == ["exact", "16-bit", "lossy"]
    assert quality(Plan(compress=gs.error_feedback(gs.fp16()))) == "16-bit"
    assert quality(Plan(compress=gs.warmup(gs.int8(), 10))) == "lossy"
    assert {quality(plan) for plan in PLANS if plan.pace != gs.every_step()} == {"other training"}


def test_residuals_and_outer_copies_take_memory() -> None:
    profile = profile_of()
    exact, int8, diloco = (
        memory_nbytes(profile, plan, 4) for plan in (Plan(), Plan(compress=gs.int8()), Plan(pace=gs.diloco(8)))
    )
    assert exact == profile.nbytes
    assert int8 >= 2 * profile.nbytes
    assert diloco == 3 * profile.nbytes


def test_stock_ddp_has_no_header_and_no_python_for_each_gradient() -> None:
    cluster = cluster_of(1e9, num_hosts=8)
    ours, stock = (predict(profile_of(), cluster, Plan(algorithm=gs.native()), stock=each) for each in (False, True))
    assert stock.exposed_s < ours.exposed_s
    assert stock.nbytes == ours.nbytes


@pytest.mark.parametrize("bandwidth", [1e-300, 1e-3])
def test_a_step_that_never_ends_is_refused(bandwidth: float) -> None:
    with pytest.raises(ValueError, match=r"a step would take .* s, longer than anybody waits"):
        predict(profile_of(), cluster_of(bandwidth), Plan())
