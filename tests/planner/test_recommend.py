"""What is recommended, and why."""

from __future__ import annotations

import pytest
from small_plans import cluster_of, profile_of

import gradsync as gs
from gradsync.cluster import Cluster, Device, Link
from gradsync.plan.sync_plan import Plan
from gradsync.planner.candidates import candidates
from gradsync.planner.collective import Collectives
from gradsync.planner.losses import measured_loss
from gradsync.planner.recommend import recommend


def test_a_fast_link_needs_nothing() -> None:
    best = recommend(profile_of(), cluster_of(50e9, device=Device(memory_bandwidth=1e12)))[0]
    assert best.plan == Plan()
    assert "buy nothing" in best.reason


@pytest.mark.parametrize(("allow", "quality"), [("exact", "exact"), ("16-bit", "16-bit"), ("lossy", "lossy")])
def test_a_slow_link_gets_the_best_that_is_allowed(allow: str, quality: str) -> None:
    found = recommend(profile_of(), cluster_of(10e6), allow=allow)  # type: ignore[arg-type]
    assert found[0].quality == quality
    kinds = ["exact", "16-bit", "lossy"]
    assert {each.quality for each in found} <= set(kinds[: kinds.index(allow) + 1])


@pytest.mark.parametrize("bandwidth", [1e5, 1e6, 1e7, 3e7, 1e8])
def test_what_raised_a_loss_must_halve_the_step(bandwidth: float) -> None:
    found = recommend(profile_of(), cluster_of(bandwidth), allow="lossy")
    gentle = [each for each in found if (loss := measured_loss(each.plan.compress)) is not None and loss.close]
    quickest = min(each.step_s for each in gentle)
    if found[0] in gentle:
        assert quickest <= 2 * min(each.step_s for each in found)
    else:
        assert found[0].step_s < 0.51 * quickest


def test_the_default_is_always_among_them_and_the_rest_is_sorted() -> None:
    found = recommend(profile_of(), cluster_of(30e6))
    assert Plan() in [each.plan for each in found]
    assert [each.exposed_s for each in found[1:]] == sorted(each.exposed_s for each in found[1:])
    assert len({str(each.plan.canonical()) for each in found}) == len(found)


def test_every_one_has_a_reason_of_one_sentence() -> None:
    for bandwidth in (1e6, 30e6, 100e6, 10e9):
        for each in recommend(profile_of(), cluster_of(bandwidth)):
            assert each.reason
            assert "\n" not in each.reason


def test_plans_of_ones_own_are_priced_beside_the_default() -> None:
    mine = [Plan(compress=gs.topk(0.05)), Plan(pace=gs.local_sgd(3))]
    assert {str(each.plan.canonical()) for each in recommend(profile_of(), cluster_of(1e8), plans=mine)} == {
        str(plan.canonical()) for plan in (Plan(), *mine)
    }


def test_sixteen_bits_of_sixteen_are_not_proposed() -> None:
    import torch

    half = profile_of(dtype=torch.float16)
    plans = candidates(half, Collectives(cluster_of(1e8)), "16-bit")
    assert all(plan.compress is None for plan in plans)


def test_hosts_of_several_ranks_may_compress_across_only() -> None:
    plans = candidates(profile_of(), Collectives(cluster_of(1e8, num_hosts=2, per_host=2)), "lossy")
    assert any(plan.compress == gs.across_hosts(gs.int8()) for plan in plans)


def test_an_unknown_wish_is_refused() -> None:
    with pytest.raises(ValueError, match="allow must be one of 'exact', '16-bit', 'lossy', 'all', got 'anything'"):
        recommend(profile_of(), cluster_of(1e8), allow="anything")  # type: ignore[arg-type]


def test_one_rank_alone_is_told_so() -> None:
    best = recommend(profile_of(), cluster_of(1e8, num_hosts=1))[0]
    assert best.plan == Plan()
    assert best.reason == "one rank alone has nothing to synchronize"


def test_an_nccl_cluster_is_priced_too() -> None:
    hosts = tuple(tuple(range(8 * h, 8 * h + 8)) for h in range(4))
    cluster = Cluster(hosts, Link(4e-6, 230e9), Link(14e-6, 11e9), backend="nccl")
    found = recommend(profile_of(num_layers=50, side=2048), cluster)
    assert all(each.step_s > 0 for each in found)
