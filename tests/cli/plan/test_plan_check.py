"""`gradsync plan --check`: a run that was saved, against what was predicted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planned import Capture, refusal, say, tiny_profile, wired

import gradsync as gs
from gradsync.cli.plan.answer import answer
from gradsync.cli.plan.check_run import split
from gradsync.cli.plan.text import assumptions
from gradsync.cli.plan.thresholds import changes, find_thresholds
from gradsync.cli.plan.what_if import with_bandwidth
from gradsync.cluster import Cluster, Link, as_hosts
from gradsync.planner.predict import predict
from gradsync.planner.profile import ModelProfile
from gradsync.trace.json_lines import to_json
from gradsync.trace.lines import RunHeader as TraceRun


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
