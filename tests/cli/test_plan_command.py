"""`gradsync plan`: an answer in a line, what trains the same first, the same as JSON, a sentence for bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gradsync as gs
from gradsync.cli.entry import main
from gradsync.cli.planning.answer import Answer, answer, trains_the_same
from gradsync.cli.planning.checking import split
from gradsync.cli.planning.sweep import Axis, parse_axis, sweep
from gradsync.cli.planning.telling import assumptions, groups, left_out
from gradsync.cli.planning.thresholds import changes, find_thresholds, least
from gradsync.cli.planning.verdict import bolder, verdict
from gradsync.cli.planning.what_if import narrow_link, with_bandwidth, with_gpus, with_tokens
from gradsync.devices import Device
from gradsync.links import Cluster, Link, as_hosts
from gradsync.planner.catalogue import cluster
from gradsync.planner.predicting import predict
from gradsync.planner.profile import Gradient, ModelProfile
from gradsync.planner.snippet import as_python, in_words
from gradsync.trace.lines import Run as TraceRun
from gradsync.trace.notation import to_json

Capture = pytest.CaptureFixture[str]

SMALL = ["--gpus", "16", "--network", "100g", "--params", "1e8", "--tokens", "1024"]
KEYS = {"command", "version", "calibrated", "cluster", "profile", "answer", "candidates"}
CANDIDATE_KEYS = {
    *("plan", "words", "step_s", "low_s", "high_s", "compute_s", "exposed_s", "overhead", "bytes", "memory_bytes"),
    *("quality", "reason"),
}


def tiny_profile(dtype: torch.dtype = torch.float32) -> ModelProfile:
    """20 matrices of 1 MB, 200 ms of backward."""
    gradients = tuple(Gradient(f"layers.{i}", (500, 500), dtype, 1e-2 * (i + 1)) for i in range(20))
    return ModelProfile(gradients, 0.1, 0.2, 0.01, tokens=1000)


def wired(bandwidth: float, hosts: int = 2) -> Cluster:
    """Hosts of one rank each with such a link between them, calibrated."""
    link = Link(20e-6, bandwidth)
    return Cluster(tuple((rank,) for rank in range(hosts)), link, link, calibrated=True)


@pytest.fixture(scope="module")
def slow() -> Answer:
    return answer(tiny_profile(), wired(10e6))


@pytest.fixture(scope="module")
def fast() -> Answer:
    return answer(tiny_profile(), wired(50e9))


def say(capsys: Capture, *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def refusal(capsys: Capture, *arguments: str) -> str:
    """The one sentence."""
    assert main(["plan", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("gradsync plan: ")
    assert told.err.count("\n") == 1
    return told.err


# --- the answer ---


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


# --- sweeps ---


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


# --- what is printed ---


def test_it_says_what_it_rests_on(capsys: Capture) -> None:
    told = " ".join(say(capsys, *SMALL).split())
    assert "From the catalogue, not validated" in told
    assert "line rate 100 Gbit/s = 12.5 GB/s, of which 11 GB/s" in told
    assert "100 million parameters, 200 MB of float16 gradients" in told
    assert "What would change the answer" in told
    assert "gs.attach(model, optimizer, gs.Plan(" in told
    assert 'kind = "every_step"' in told


def test_a_cluster_and_a_profile_come_from_files(tmp_path: Path, capsys: Capture) -> None:
    wired(10e6).save(tmp_path / "cluster.toml")
    tiny_profile().save(tmp_path / "profile.toml")
    files = ["--cluster", str(tmp_path / "cluster.toml"), "--profile", str(tmp_path / "profile.toml")]
    told = say(capsys, *files, "--out", str(tmp_path / "plan.toml"))
    assert "Calibrated by a probe" in told
    assert gs.Plan.load(tmp_path / "plan.toml").compress == gs.bf16()
    say(capsys, *files, "--out", str(tmp_path / "plan.toml"))  # a plan may be replaced


def test_json_has_the_documented_fields(capsys: Capture) -> None:
    told = json.loads(say(capsys, *SMALL, "--json", "--sweep", "bandwidth=10gbit..40gbit"))
    assert set(told) == KEYS | {"sweep"}
    assert told["version"] == 1
    assert told["calibrated"] is False
    assert all(set(candidate) == CANDIDATE_KEYS for candidate in told["candidates"])
    assert told["answer"]["plan"] == told["candidates"][0]["plan"]
    assert gs.Plan().canonical() in [candidate["plan"] for candidate in told["candidates"]]
    for candidate in told["candidates"]:
        assert candidate["overhead"] == pytest.approx(candidate["exposed_s"] / candidate["step_s"])
        assert candidate["low_s"] <= candidate["step_s"] <= candidate["high_s"]
    assert [point["value"] for point in told["sweep"][0]["points"]] == [1.25e9, 2.5e9, 5e9]


def test_every_json_field_is_documented() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "planning.md").read_text()
    documented: Callable[[str], bool] = lambda name: f"`{name}`" in page  # noqa: E731
    answer_keys = {"sentence", "needed", "python", "default_overhead", "ddp_overhead", "changes"}
    assert [
        name for name in sorted(KEYS | CANDIDATE_KEYS | answer_keys | {"sweep", "check"}) if not documented(name)
    ] == []


# --- bad input ---


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "how many GPUs?"),
        (["--gpus", "8"], "which model?"),
        (["--gpus", "30", "--network", "100g", "--params", "1e9"], "30 GPUs do not fill hosts of 8"),
        (["--gpus", "32", "--params", "1e9"], "4 hosts need a network"),
        (["--gpus", "32", "--network", "100x", "--params", "1e9"], "'100x' is no rate"),
        (["--gpus", "8", "--device", "a10O", "--params", "1e9"], "did you mean a10 or a100"),
        (["--gpus", "8", "--arch", "gpt3"], "did you mean gpt2"),
        (["--gpus", "8", "--params", "1e9", "--tokens", "0"], "at least 1"),
        (["--gpus", "8", "--params", "1e9", "--mfu", "45"], "mfu must be a share"),
        (["--gpus", "8", "--params", "1e9", "--mfu", "0"], "mfu must be a share"),
        (["--gpus", "8", "--params", "1e9", "--arch", "gpt2"], "leave --params out"),
        (["--gpus", "8", "--cluster", "c.toml", "--params", "1e9"], "leave --gpus out"),
        (["--gpus", "8", "--profile", "p.toml", "--params", "1e9"], "leave --params out"),
        (["--cluster", "nowhere.toml", "--params", "1e9"], "cannot be read: No such file"),
        (["--gpus", "8", "--device", "cpu", "--params", "1e9"], "say --flops"),
        (["--gpus", "8", "--params", "1e9", "--sweep", "gpu=1..2"], "is no sweep"),
        (["--gpus", "8", "--params", "1e9", "--sweep", "gpus=64..8"], "is empty"),
        (["--gpus", "8", "--params", "1e7", "--sweep", "gpus=8..64"], "needs a network between hosts"),
        (["--gpus", "8", "--params", "1e7", "--network", "1g", "--sweep", "gpus=8..12"], "does not fill hosts of 8"),
        (["--gpus", "8", "--params", "1e7", "--sweep", "gpus=8..1e12"], "from 1 to 1,000,000 GPUs, got 1000000000000"),
        (["--gpus", "8", "--params", "1e15"], "at most 1,000,000,000,000 parameters"),
        (["--gpus", "8", "--params", "1e9", "--html", "/nowhere/page.html"], "cannot be written"),
        (["--gpus", "8", "--params", "1e7", "--html", "/dev/full"], "No space left"),
        (["--gpus", "8", "--params", "1e7", "--out", "/dev/full"], "No space left"),
        (["--gpus", "8", "--params", "1e7", "--out", "/proc/x.toml"], "cannot be written"),
        (["--check", "/nowhere"], "is no folder"),
        (["--check", "/tmp", "--gpus", "8"], "leave --gpus out"),
    ],
)
def test_bad_input_ends_with_one_sentence(capsys: Capture, arguments: list[str], sentence: str) -> None:
    assert sentence in refusal(capsys, *arguments)


def test_a_file_with_a_wrong_field_is_named(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("bandwith = 3\nnum_hosts = 1\nranks_per_host = 2\n[inside]\nlatency_s = 0\nbandwidth = 1e9\n")
    told = refusal(capsys, "--cluster", str(path), "--params", "1e9")
    assert str(path) in told
    assert "bandwith" in told


def test_what_is_no_plan_is_not_overwritten(tmp_path: Path, capsys: Capture) -> None:
    for option, name in (("--out", "notes.toml"), ("--html", "notes.html")):
        path = tmp_path / name
        path.write_text("shopping = 'milk'\n")
        assert "something else already" in refusal(capsys, *SMALL, option, str(path))
        assert path.read_text() == "shopping = 'milk'\n"


def test_numbers_that_cannot_be_reckoned_with_are_a_sentence(tmp_path: Path, capsys: Capture) -> None:
    replace(tiny_profile(), forward_s=1e308).save(tmp_path / "profile.toml")
    assert "look at the profile's times" in refusal(capsys, "--gpus", "8", "--profile", str(tmp_path / "profile.toml"))


def test_one_probed_host_cannot_be_swept_and_hears_a_way_out(tmp_path: Path, capsys: Capture) -> None:
    link = Link(10e-6, 1e9)
    Cluster(as_hosts(2), link, link, calibrated=True).save(tmp_path / "cluster.toml")
    told = refusal(
        *(capsys, "--cluster", str(tmp_path / "cluster.toml"), "--params", "1e7"),
        *("--flops", "1e12", "--sweep", "gpus=2..8"),
    )
    assert "probe two hosts under torchrun" in told
    assert "describe the parts instead of it" in told


def test_names_do_not_reach_the_terminal_raw(tmp_path: Path, capsys: Capture) -> None:
    evil = "\x1b[2Jgone\nYou are safe"
    device = Device(name=evil, memory_bandwidth=1e10)
    replace(wired(10e6), name=evil, device=device).save(tmp_path / "cluster.toml")
    gradients = tuple(it._replace(name=f"{evil} {it.name}") for it in tiny_profile().gradients)
    replace(tiny_profile(), name=evil, gradients=gradients).save(tmp_path / "profile.toml")
    page = tmp_path / "page.html"
    files = ["--cluster", str(tmp_path / "cluster.toml"), "--profile", str(tmp_path / "profile.toml")]
    for told in (say(capsys, *files, "--html", str(page)), page.read_text()):
        assert "\x1b" not in told
        assert "\nYou are safe" not in told
        assert "�[2Jgone�You are safe" in told
    (tmp_path / "cluster.toml").write_text('"\\u001b[2J" = 1\n')
    assert "\x1b" not in refusal(capsys, *files)


# --- a run that was saved ---


def save_run(folder: Path, plan: gs.Plan, rows: list[dict[str, Any]]) -> None:
    wired(10e6).save(folder / "cluster.toml")
    tiny_profile().save(folder / "profile.toml")
    plan.save(folder / "plan.toml")
    for rank in range(2):
        header = to_json(TraceRun(rank, 2, "a", 1, 0.0, 0.0, "gradsync", "cpu", None, []))
        steps = [json.dumps({"kind": "step", "at": 0.0, "phases": []} | row) for row in rows]
        (folder / f"rank-{rank}.jsonl").write_text("\n".join([header, *steps]) + "\n")


def test_a_check_finds_the_link_that_was_slower(tmp_path: Path, capsys: Capture) -> None:
    plan = gs.Plan(compress=gs.bf16())
    truth = predict(tiny_profile(), with_bandwidth(wired(10e6), 5e6), plan)
    save_run(tmp_path, plan, [{"step": n, "step_s": truth.step_s, "exposed_s": split(truth)[1]} for n in range(9)])
    told = json.loads(say(capsys, "--check", str(tmp_path), "--json"))["check"]
    assert told["culprit"] == "exposed"
    assert told["error"] < -0.2
    assert told["refitted"]["link_factor"] == pytest.approx(0.5, rel=0.05)
    assert told["refitted"]["compute_factor"] == pytest.approx(1.0, rel=0.02)
    assert told["refitted"]["step_s"] == pytest.approx(truth.step_s, rel=0.03)
    assert Cluster.load(tmp_path / "cluster.refit.toml").across.bandwidth == pytest.approx(5e6, rel=0.05)
    assert ModelProfile.load(tmp_path / "profile.refit.toml").num_params == tiny_profile().num_params


def test_a_check_finds_computation_that_was_slower(tmp_path: Path, capsys: Capture) -> None:
    predicted = predict(tiny_profile(), wired(10e6), gs.Plan())
    step_s = predicted.step_s + predicted.compute_s
    save_run(tmp_path, gs.Plan(), [{"step": 1, "step_s": step_s, "exposed_s": split(predicted)[1]}] * 5)
    told = " ".join(say(capsys, "--check", str(tmp_path)).split())
    assert "Further off is computation" in told
    assert "computation × 2.0" in told
    assert "The plan would be" in told


def test_a_wait_that_no_link_explains_leaves_the_links_alone(tmp_path: Path, capsys: Capture) -> None:
    save_run(tmp_path, gs.Plan(), [{"step": 1, "step_s": 0.4, "exposed_s": 0.0}] * 5)
    told = json.loads(say(capsys, "--check", str(tmp_path), "--json"))["check"]["refitted"]
    assert told["link_factor"] is None
    assert Cluster.load(tmp_path / "cluster.refit.toml").across == wired(10e6).across


def test_a_batch_that_nobody_counted_is_told_as_a_factor() -> None:
    uncounted = answer(replace(tiny_profile(), tokens=1.0), wired(10e6))
    told = changes(uncounted, find_thresholds(uncounted))[-1]
    assert "times the batch on (now 1)" in told
    assert "tokens" not in " ".join(assumptions(uncounted))


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([], "at least 3 are needed"),
        ([{"step": 1, "step_s": "long", "exposed_s": 0.1}] * 4, "rank-0.jsonl holds 0 steps"),
        ([{"step": 1}] * 4, "rank-0.jsonl holds 0 steps"),
        ([{"step": 1, "step_s": 10**400, "exposed_s": 0.0}] * 4, "rank-0.jsonl holds 0 steps"),
        ([{"step": 1, "step_s": 0.0, "exposed_s": 0.0}] * 4, "took 0 s"),
    ],
)
def test_a_check_of_a_file_without_steps_says_which(
    tmp_path: Path, capsys: Capture, rows: list[dict[str, Any]], sentence: str
) -> None:
    save_run(tmp_path, gs.Plan(), rows)
    assert sentence in refusal(capsys, "--check", str(tmp_path))
    assert not list(tmp_path.glob("*.refit.toml"))


def test_a_check_of_a_step_that_computes_nothing_is_refused(tmp_path: Path, capsys: Capture) -> None:
    save_run(tmp_path, gs.Plan(), [{"step": 1, "step_s": 0.4, "exposed_s": 0.1}] * 5)
    gradients = tuple(it._replace(ready_s=0.0) for it in tiny_profile().gradients)
    ModelProfile(gradients, 0.0, 0.0).save(tmp_path / "profile.toml")
    assert "profile.toml: a step computes for 0 s" in refusal(capsys, "--check", str(tmp_path))
    assert not list(tmp_path.glob("*.refit.toml"))


def test_a_check_of_a_binary_file_names_it(tmp_path: Path, capsys: Capture) -> None:
    save_run(tmp_path, gs.Plan(), [{"step": 1, "step_s": 0.4, "exposed_s": 0.1}] * 5)
    (tmp_path / "rank-1.jsonl").write_bytes(b"\x80\xff\x00" * 9)
    assert "holds no rank-1.jsonl of 2 ranks, or no trace in it" in refusal(capsys, "--check", str(tmp_path))


def test_a_check_without_a_rank_says_which(tmp_path: Path, capsys: Capture) -> None:
    save_run(tmp_path, gs.Plan(), [{"step": 1, "step_s": 0.4, "exposed_s": 0.1}] * 5)
    path = tmp_path / "rank-0.jsonl"
    path.write_text(path.read_text().replace('"world_size":2', '"world_size":3'))
    assert "holds no rank-2.jsonl of 3 ranks" in refusal(capsys, "--check", str(tmp_path))


def test_a_check_compares_waiting_with_waiting(tmp_path: Path, capsys: Capture) -> None:
    """Copies and contention are no waiting, though they are a cost: a prediction that came true needs no refit."""
    truth = predict(tiny_profile(), wired(10e6), gs.Plan())
    computing_s, waiting_s = split(truth)
    assert waiting_s < truth.exposed_s
    assert computing_s + waiting_s == pytest.approx(truth.step_s)
    save_run(tmp_path, gs.Plan(), [{"step": 1, "step_s": truth.step_s, "exposed_s": waiting_s}] * 5)
    told = json.loads(say(capsys, "--check", str(tmp_path), "--json"))["check"]
    assert told["predicted"]["waiting_s"] == pytest.approx(waiting_s)
    assert told["refitted"]["compute_factor"] == pytest.approx(1.0, rel=0.01)
    assert told["refitted"]["link_factor"] == pytest.approx(1.0, rel=0.03)


def test_a_check_of_something_else_says_what_is_missing(tmp_path: Path, capsys: Capture) -> None:
    assert "plan.toml cannot be read" in refusal(capsys, "--check", str(tmp_path))
    gs.Plan().save(tmp_path / "plan.toml")
    assert "holds no trace" in refusal(capsys, "--check", str(tmp_path))


def test_a_run_that_was_cut_off_can_be_checked(tmp_path: Path, capsys: Capture) -> None:
    save_run(tmp_path, gs.Plan(), [{"step": 1, "step_s": 0.1, "exposed_s": 0.05}] * 5)
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 6, "ste')
    assert json.loads(say(capsys, "--check", str(tmp_path), "--json"))["check"]["steps"] == 5


def test_hosts_of_the_probe_may_be_one(capsys: Capture, tmp_path: Path) -> None:
    link = Link(10e-6, 1e9)
    Cluster(as_hosts(2), link, link, memory=Link(10e-6, 8e9), calibrated=True).save(tmp_path / "cluster.toml")
    tiny_profile().save(tmp_path / "profile.toml")
    files = ["--cluster", str(tmp_path / "cluster.toml"), "--profile", str(tmp_path / "profile.toml")]
    assert "shared memory" in say(capsys, *files)
