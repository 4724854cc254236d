"""The answer of `gradsync plan`: what trains the same first, what would change it, and plans in words."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from planned import SMALL, Capture, say, tiny_profile, wired

import gradsync as gs
from gradsync.cli.planning.answer import Answer, answer, trains_the_same
from gradsync.cli.planning.telling import groups, left_out
from gradsync.cli.planning.thresholds import changes, find_thresholds, least
from gradsync.cli.planning.verdict import bolder, verdict
from gradsync.cli.planning.what_if import narrow_link, with_bandwidth, with_gpus, with_tokens
from gradsync.planner.catalogue import cluster
from gradsync.planner.predicting import predict
from gradsync.planner.snippet import as_python, in_words


@pytest.fixture(scope="module")
def slow() -> Answer:
    return answer(tiny_profile(), wired(10e6))


@pytest.fixture(scope="module")
def fast() -> Answer:
    return answer(tiny_profile(), wired(50e9))


def test_a_fast_link_needs_no_gradsync(fast: Answer) -> None:
    assert not fast.needed
    assert verdict(fast).startswith("You do not need gradsync for speed here: exact averaging overlapped with backward")
    assert fast.chosen.plan == gs.Plan()


def test_a_slow_link_is_answered_in_sixteen_bits_first(slow: Answer) -> None:
    assert slow.needed
    assert slow.chosen.quality == "16-bit"
    assert "bf16" in verdict(slow)
    assert bolder(slow) is not None
    assert "but is lossy" in verdict(slow)


def test_what_trains_differently_never_stands_before_the_best_of_the_same_training(slow: Answer) -> None:
    same = [trains_the_same(candidate) for candidate in slow.candidates]
    assert same == sorted(same, reverse=True)
    assert groups(slow)[0][1][0] is slow.chosen


def test_a_larger_batch_is_no_same_training(slow: Answer) -> None:
    assert any(isinstance(it.plan.pace, gs.paces.Accumulate) for it in slow.other)
    assert not any(isinstance(it.plan.pace, gs.paces.Accumulate) for it in slow.same)


def test_what_the_user_allows_may_be_chosen() -> None:
    assert answer(tiny_profile(), wired(10e6), "lossy").chosen.quality == "lossy"
    assert answer(tiny_profile(), wired(10e6), "exact").chosen.quality == "exact"


def test_one_rank_has_nothing_to_plan() -> None:
    alone = answer(tiny_profile(), wired(10e6, hosts=1))
    assert "nothing to plan" in verdict(alone)
    assert changes(alone, find_thresholds(alone)) == []


def test_the_yardstick_is_stock_ddp(slow: Answer) -> None:
    assert slow.ddp == predict(slow.profile, slow.cluster, gs.Plan(algorithm=gs.native()), stock=True)
    assert slow.ddp not in slow.candidates


def test_where_ddp_is_faster_it_says_so(fast: Answer) -> None:
    costs = replace(fast.chosen, step_s=0.4, exposed_s=0.09)
    stock = replace(fast.ddp, step_s=0.35, exposed_s=0.04)
    slower = replace(fast, candidates=(costs,), chosen=costs, usual=costs, ddp=stock)
    assert not slower.needed
    told = verdict(slower)
    assert told == "You do not need gradsync for speed here: stock DDP costs 11 % of the step, gradsync 22 %."


def test_a_lossy_choice_does_not_make_gradsync_needed(fast: Answer) -> None:
    lossy = next(it for it in fast.candidates if it.quality == "lossy")
    quick = replace(lossy, step_s=0.31, exposed_s=0.0)
    stock = replace(fast.usual, step_s=0.323, exposed_s=0.013)  # 4 %
    same = tuple(replace(it, step_s=0.323, exposed_s=0.013) for it in fast.same)
    chosen = replace(fast, candidates=(quick, *same), chosen=quick, usual=same[0], ddp=stock)
    assert not chosen.needed
    assert "is lossy" in verdict(chosen)


def test_an_offer_changes_as_little_as_it_must(slow: Answer) -> None:
    pace = next(it for it in slow.other if isinstance(it.plan.pace, gs.paces.DiLoCo) and it.plan.compress is None)
    packed = replace(pace, plan=replace(pace.plan, compress=gs.int4()), step_s=pace.step_s - 1e-4)
    offered = replace(slow, candidates=(*slow.same, packed, pace))
    assert bolder(offered) is pace
    only = replace(slow, candidates=(*slow.same, packed))
    assert bolder(only) is packed
    exact = tuple(it for it in slow.same if it.quality == "exact")
    assert find_thresholds(replace(only, candidates=(*exact, packed))).compressed is None


def test_a_step_that_only_waits_is_told_in_seconds() -> None:
    waits = answer(tiny_profile(), wired(2e3))
    assert "100 % of the step, " in verdict(waits)
    assert changes(waits, find_thresholds(waits))[-1].startswith("No batch up to 10,000 times this one brings")


def test_a_model_that_does_not_fit_is_told(capsys: Capture) -> None:
    arguments = ["--gpus", "8", "--device", "a100", "--params", "7e9"]
    sentence = "The model does not fit: about 112 GB for weights, gradients and Adam, 80 GB on each GPU; you want FSDP."
    assert sentence in " ".join(say(capsys, *arguments).split())
    assert sentence in json.loads(say(capsys, *arguments, "--json"))["answer"]["changes"]
    assert "does not fit" not in say(capsys, *SMALL)


def test_the_gentlest_lossy_plan_is_spoken_of_and_shown(slow: Answer) -> None:
    option = bolder(slow)
    assert option is not None
    assert "int" in in_words(option.plan)
    assert 0 < left_out(slow) < len(slow.candidates)


# --- what would change it ---


def test_thresholds_are_where_the_answer_changes(slow: Answer) -> None:
    found = find_thresholds(slow)
    assert found.bandwidth is not None
    assert found.tokens is not None
    assert found.break_even is not None
    for factor, under in ((0.9, False), (1.1, True)):
        other = with_bandwidth(slow.cluster, factor * found.bandwidth)
        assert (predict(slow.profile, other, gs.Plan()).overhead < 0.05) == under
        larger = with_tokens(slow.profile, factor * found.tokens)
        assert (predict(larger, slow.cluster, gs.Plan()).overhead < 0.05) == under
    assert found.break_even > narrow_link(slow.cluster).bandwidth
    assert len(changes(slow, found)) == 3


def test_thresholds_of_a_fast_link_say_how_far_it_may_fall(fast: Answer) -> None:
    told = " ".join(changes(fast, find_thresholds(fast)))
    assert "stays under 5 % down to" in told
    assert "would pay below" in told


def test_bisection_knows_both_ends() -> None:
    assert least(lambda x: x > 10, 1, 100) == pytest.approx(10, rel=0.02)
    assert least(lambda x: True, 1, 100) == 1
    assert least(lambda x: False, 1, 100) is None


def test_more_gpus_fill_hosts_of_the_same_size() -> None:
    larger = with_gpus(cluster(16, 8, network="100g"), 64)
    assert [len(host) for host in larger.hosts] == [8] * 8
    assert [len(host) for host in with_gpus(larger, 12).hosts] == [8, 4]


# --- plans in words ---


@pytest.mark.parametrize(
    "plan",
    [
        gs.Plan(),
        gs.Plan(algorithm=gs.tree(4), bucket_bytes=1 << 20),
        gs.Plan(algorithm=gs.ring(), compress=gs.int8(rounding="stochastic")),
        gs.Plan(compress=gs.int8(feedback=False, block=128), audit_every=5, overlap="none"),
        gs.Plan(compress=gs.across_hosts(gs.topk(0.01))),
        gs.Plan(
            compress=gs.warmup(
                gs.by_parameter(
                    [gs.rule(dims=1, compress=None), gs.rule("*x*", compress=gs.powersgd(8))], default=gs.bf16()
                ),
                steps=10,
            )
        ),
        gs.Plan(pace=gs.diloco(50, gs.nesterov(0.5), fragments=5), compress=gs.error_feedback(gs.bf16())),
        gs.Plan(pace=gs.async_sgd(None)),
        gs.Plan(pace=gs.async_sgd(4)),
        gs.Plan(pace=gs.gossip("exponential"), combine="mean"),
        gs.Plan(pace=gs.accumulate(4), combine="sum"),
    ],
    ids=in_words,
)
def test_the_snippet_makes_the_plan(plan: gs.Plan) -> None:
    assert eval(as_python(plan), {"gs": gs}) == plan
