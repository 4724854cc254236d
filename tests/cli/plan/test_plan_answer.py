"""The answer of `gradsync plan`: what trains the same first, what would change it, and plans in words."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from planned import SMALL, Capture, say, tiny_profile, wired
from rich.console import Console

import gradsync as gs
from gradsync.cli.plan.answer import Answer, answer, trains_the_same
from gradsync.cli.plan.candidate_rows import groups, left_out, table
from gradsync.cli.plan.one_line import in_one_line, offers
from gradsync.cli.plan.sweep import Axis, sweep
from gradsync.cli.plan.text import assumptions, sweep_table
from gradsync.cli.plan.thresholds import changes, find_thresholds, least
from gradsync.cli.plan.what_if import narrow_link, with_bandwidth, with_gpus, with_tokens
from gradsync.cluster import Device
from gradsync.plan import paces
from gradsync.planner.catalogue import cluster
from gradsync.planner.from_size import describe
from gradsync.planner.predict import predict
from gradsync.planner.snippet import as_python, in_words
from gradsync.units import show_seconds


@pytest.fixture(scope="module")
def slow() -> Answer:
    return answer(tiny_profile(), wired(10e6))


@pytest.fixture(scope="module")
def fast() -> Answer:
    return answer(tiny_profile(), wired(50e9))


def test_a_fast_link_needs_no_gradsync(fast: Answer) -> None:
    assert not fast.needed
    assert in_one_line(fast).startswith(
        "You do not need gradsync for speed here: exact averaging overlapped with backward"
    )
    assert fast.chosen.plan == gs.Plan()


def test_a_slow_link_is_answered_in_sixteen_bits_first(slow: Answer) -> None:
    assert slow.needed
    assert slow.chosen.quality == "16-bit"
    assert "bf16" in in_one_line(slow)
    assert offers(slow)
    assert "but is lossy" in in_one_line(slow)


def test_what_trains_differently_never_stands_before_the_best_of_the_same_training(slow: Answer) -> None:
    same = [trains_the_same(candidate) for candidate in slow.candidates]
    assert same == sorted(same, reverse=True)
    assert groups(slow)[0][1][0] is slow.chosen


def test_a_larger_batch_is_no_same_training(slow: Answer) -> None:
    assert any(isinstance(it.plan.pace, paces.Accumulate) for it in slow.other)
    assert not any(isinstance(it.plan.pace, paces.Accumulate) for it in slow.same)


def test_what_the_user_allows_may_be_chosen() -> None:
    assert answer(tiny_profile(), wired(10e6), "lossy").chosen.quality == "lossy"
    assert answer(tiny_profile(), wired(10e6), "exact").chosen.quality == "exact"


def test_one_rank_has_nothing_to_plan() -> None:
    alone = answer(tiny_profile(), wired(10e6, hosts=1))
    assert "nothing to plan" in in_one_line(alone)
    assert changes(alone, find_thresholds(alone)) == []


def test_the_yardstick_is_stock_ddp(slow: Answer) -> None:
    assert slow.ddp == predict(slow.profile, slow.cluster, gs.Plan(algorithm=gs.native()), stock=True)
    assert slow.ddp not in slow.candidates


def test_where_ddp_is_faster_it_says_so(fast: Answer) -> None:
    costs = replace(fast.chosen, step_s=0.4, exposed_s=0.09)
    stock = replace(fast.ddp, step_s=0.35, exposed_s=0.04)
    slower = replace(fast, candidates=(costs,), chosen=costs, usual=costs, ddp=stock)
    assert not slower.needed
    told = in_one_line(slower)
    assert told.startswith("You do not need gradsync for speed here: with stock DDP a step takes 350 ms (11 %), with ")
    assert told.endswith("with gradsync 400 ms (22 %).")


def test_a_lossy_choice_does_not_make_gradsync_needed(fast: Answer) -> None:
    lossy = next(it for it in fast.candidates if it.quality == "lossy")
    quick = replace(lossy, step_s=0.31, exposed_s=0.0)
    stock = replace(fast.usual, step_s=0.323, exposed_s=0.013)  # 4 %
    same = tuple(replace(it, step_s=0.323, exposed_s=0.013) for it in fast.same)
    chosen = replace(fast, candidates=(quick, *same), chosen=quick, usual=same[0], ddp=stock)
    assert not chosen.needed
    assert "is lossy" in in_one_line(chosen)


def test_an_offer_changes_as_little_as_it_must(slow: Answer) -> None:
    pace = next(it for it in slow.other if isinstance(it.plan.pace, paces.DiLoCo) and it.plan.compress is None)
    packed = replace(pace, plan=replace(pace.plan, compress=gs.int4()), step_s=pace.step_s - 1e-4)
    offered = replace(slow, candidates=(*slow.same, packed, pace))
    assert offers(offered) == (pace,)
    only = replace(slow, candidates=(*slow.same, packed))
    assert offers(only) == (packed,)
    exact = tuple(it for it in slow.same if it.quality == "exact")
    assert find_thresholds(replace(only, candidates=(*exact, packed))).compressed is None


def test_a_step_that_only_waits_is_told_in_seconds() -> None:
    waits = answer(tiny_profile(), wired(2e3))
    assert "nearly all of it synchronization; bf16 brings it to" in in_one_line(waits)
    assert changes(waits, find_thresholds(waits))[-1].startswith("No batch up to 10,000 times this one brings")


def test_a_model_that_does_not_fit_is_told(capsys: Capture) -> None:
    arguments = ["--gpus", "8", "--device", "a100", "--params", "7e9"]
    sentence = "The model does not fit: about 112 GB for weights, gradients and Adam, 80 GB on each GPU; you want FSDP."
    assert " ".join(say(capsys, *arguments).split()).startswith(f"{sentence} If it did fit: you do not need gradsync")
    told = json.loads(say(capsys, *arguments, "--json"))["answer"]
    assert told["sentence"].startswith(sentence)
    assert sentence in told["changes"]
    assert "does not fit" not in say(capsys, *SMALL)


def test_the_gentlest_lossy_plan_is_spoken_of_and_shown(slow: Answer) -> None:
    option = offers(slow)[0]
    assert "int" in in_words(option.plan)
    assert option in [it for _, group in groups(slow) for it in group]
    assert 0 < left_out(slow) < len(slow.candidates)


# --- seconds, and what mends it ---


def crawling(allow: Any = None) -> Answer:
    """350 million parameters over 100 Mbit/s."""
    machines = cluster(2, 1, network="100mbit")
    return answer(describe(3.5e8, tokens=8192), machines, allow)


def test_the_headline_says_seconds_and_names_what_mends_it() -> None:
    slow = crawling()
    told = in_one_line(slow)
    assert told.startswith(f"With DDP a step will take {show_seconds(slow.ddp.step_s)}, nearly all of it sync")
    assert f"bf16 brings it to {show_seconds(slow.chosen.step_s)}" in told
    gentle, bold = offers(slow)
    assert gentle.plan == gs.Plan(compress=gs.int4())
    assert f"int4 would bring it to {show_seconds(gentle.step_s)}" in told
    assert "loss +0.7 % where measured" in told
    assert f"{in_words(bold.plan)} to {show_seconds(bold.step_s)}" in told
    assert bold.step_s < gentle.step_s / 10  # what the table has
    assert bold.step_s <= 1.5 * min(it.step_s for it in slow.candidates)
    assert "100 %" not in told


@pytest.mark.parametrize("allow", ["16-bit", "lossy", "all"])
def test_among_what_is_allowed_no_plan_is_much_faster_than_the_chosen_one(allow: str) -> None:
    found = crawling(allow)
    assert found.chosen.step_s <= 1.1 * min(it.step_s for it in found.candidates)


@pytest.mark.parametrize("network", ["1gbit", "10g", "25g", "100g", "200g", "400g"])
@pytest.mark.parametrize("allow", [None, "exact", "lossy", "all"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_choice_beats_the_default_by_more_than_its_interval(network: str, allow: Any, dtype: str) -> None:
    machines = cluster(32, 8, network=network)
    found = answer(describe(1e9, dtype), machines, allow)
    assert found.chosen is found.usual or found.usual.step_s > found.chosen.high_s
    usual = replace(found.chosen.plan, algorithm=None, bucket_bytes=None)
    if usual != found.chosen.plan:  # what is said pays, or is left out
        plain = predict(found.profile, machines, usual)
        assert plain.exposed_s - found.chosen.exposed_s > 0.015 * found.chosen.step_s


def test_gains_within_the_interval_are_told_as_such() -> None:
    found = answer(describe(1e9, "fp16"), cluster(32, 8, network="100g"))
    other = next(it for it in found.same if it.plan.algorithm is not None and it.exposed_s < found.usual.exposed_s)
    assert found.chosen is found.usual
    assert other.reason.endswith("within its interval")


def test_the_dtype_that_nobody_said_is_said(capsys: Capture) -> None:
    assumed = "float32 gradients are assumed, as under autocast; if the parameters are in 16 bits, say --dtype bf16"
    assert assumed in " ".join(say(capsys, *SMALL).split())
    assert assumed in json.loads(say(capsys, *SMALL, "--json"))["answer"]["assumptions"][-1]
    told = " ".join(say(capsys, *SMALL, "--dtype", "bf16").split())
    assert "of bfloat16 gradients" in told
    assert "assumed" not in told


def test_ranks_that_share_cores_compute_for_longer_and_are_told_why() -> None:
    shared = replace(wired(1e9), device=Device(cores=0.5, memory_bandwidth=1e10))
    found = answer(tiny_profile(), shared)
    assert found.usual.compute_s == pytest.approx(2 * tiny_profile().compute_s)
    assert any("each gets 0.50 of a core: the 310 ms of a step become 620 ms" in it for it in assumptions(found))
    assert not any("of a core" in it for it in assumptions(answer(tiny_profile(), wired(1e9))))


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_each_plan_takes_two_lines_at_most_on_any_terminal(width: int, slow: Answer) -> None:
    for found in (slow, crawling(), answer(describe(1e9), cluster(32, 8, network="100g"))):
        lines = table(found, width)
        assert max(line.cell_len for line in lines) <= width
        shown = len(found.candidates) - left_out(found)
        assert len(lines) <= 1 + len(groups(found)) + 2 * shown
        console = Console(width=width, file=io.StringIO())
        for line in lines:
            console.print(line, no_wrap=True)
        assert len(console.file.getvalue().splitlines()) == len(lines)  # type: ignore[attr-defined]


def test_a_point_of_a_sweep_takes_two_lines_at_most_on_80_columns() -> None:
    points = sweep(Axis("gpus", 8, 64), answer(describe(1e9), cluster(32, 8, network="100g")))
    console = Console(width=80, file=io.StringIO())
    console.print(sweep_table(Axis("gpus", 8, 64), points, 80))
    assert len(console.file.getvalue().splitlines()) <= 2 + 2 * len(points)  # type: ignore[attr-defined]


def test_offers_are_worth_their_price(slow: Answer) -> None:
    for found in (slow, crawling(), answer(describe(1e9), cluster(32, 8, network="100g"))):
        best = found.chosen
        for offer in offers(found):
            assert offer.step_s < best.step_s
            best = offer


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
