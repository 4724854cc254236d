"""`gradsync demo`: bad input gets a sentence, the table's claims are true, a killed rank is named, nothing is left."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gradsync.cli.demo import command as demo
from gradsync.cli.demo.story.corpus import VOCABULARY, draw, read_library
from gradsync.cli.demo.story.demo_model import DemoShape, build, loss_of
from gradsync.cli.demo.story.demo_result import DemoResult, DemoVariantResult, Spread, VariantComparison
from gradsync.cli.demo.story.killed_rank import RankDeath, SurvivorReport
from gradsync.cli.demo.story.slow_input import RankTimes, SlowInput
from gradsync.cli.demo.story.slow_input_text import sentences as slow_sentences
from gradsync.cli.demo.story.text import sentences
from gradsync.cli.demo.story.train_variants import ALONE, DDP, GRADSYNC, ONE, VARIANTS
from gradsync.cli.demo.story.weight_distance import WeightDistance, distance
from gradsync.cli.main import main
from gradsync.errors import GradSyncError

TINY = DemoShape(layers=1, width=16, heads=2, context=16, batch=2)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Temporary files are made here, so that one can see what is left of them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def run_tiny(capsys: pytest.CaptureFixture[str], **options: Any) -> Any:
    """The command on a model of a few thousand parameters; its JSON."""
    usual = {"ranks": 2, "kill": None, "slow": None, "slow_link": None, "share_gpus": False, "json": True}
    assert demo.run(argparse.Namespace(**{"steps": None, "shape": TINY} | usual | options)) == 0
    return json.loads(capsys.readouterr().out)


# --- input ---


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "gradsync: name a command, for example: gradsync demo; see gradsync --help"),
        (["dance"], "gradsync: argument COMMAND: invalid choice: 'dance'"),
        (["demo", "--ranks", "0"], "gradsync demo: argument --ranks: needs a whole number from 2 to 16, got '0'"),
        (["demo", "--ranks", "1"], "gradsync demo: argument --ranks: needs a whole number from 2 to 16, got '1'"),
        (["demo", "--ranks", "two"], "gradsync demo: argument --ranks: needs a whole number from 2 to 16, got 'two'"),
        (["demo", "--steps", "1.5"], "gradsync demo: argument --steps: needs a whole number from 6 to 100000"),
        (["demo", "--kill", "-1"], "gradsync demo: argument --kill: needs a whole number from 0 to 15, got '-1'"),
        (["demo", "--kill", "2"], "gradsync demo: --kill 2 names no rank: with --ranks 2 they are 0 to 1"),
        (["demo", "--slow", "2"], "gradsync demo: --slow 2 names no rank: with --ranks 2 they are 0 to 1"),
        (["demo", "--slow", "1", "--kill", "1"], "gradsync demo: --slow is a story of its own: leave out --kill and"),
        (["demo", "--speed"], "gradsync demo: unrecognized arguments: --speed; see gradsync demo --help"),
    ],
)
def test_bad_input_ends_with_2_and_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(sentence)
    assert err.count("\n") == 1


@pytest.mark.parametrize(("arguments", "example"), [(["--help"], "gradsync demo"), (["demo", "--help"], "--kill 1")])
def test_help_has_an_example(arguments: list[str], example: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0
    assert example in capsys.readouterr().out.split("example:")[1]


# --- text and model ---


def test_text_is_the_same_at_every_reading() -> None:
    first, second = read_library(), read_library()
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.validation, second.validation)
    assert int(first.train.max()) < VOCABULARY


def test_every_tenth_file_is_held_out(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"module_{number:02}.py").write_text(chr(ord("a") + number) * 10_000)
    text = read_library(tmp_path)
    assert bytes(text.validation[::10_000].tolist()) == b"jt"
    assert bytes(text.train[::10_000].tolist()) == b"abcdefghiklmnopqrs"


def test_missing_source_is_said() -> None:
    with pytest.raises(GradSyncError, match="holds too little Python source to train on"):
        read_library(Path("/nowhere"))


def test_windows_are_shifted_by_one_and_follow_from_the_seed() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    read, guess = draw(text, 4, 8, seed=3)
    assert torch.equal(read + 1, guess)
    assert torch.equal(read, draw(text, 4, 8, seed=3)[0])
    assert not torch.equal(read, draw(text, 4, 8, seed=4)[0])


def test_model_sees_no_later_character() -> None:
    model = build(TINY)
    text = torch.zeros(1, TINY.context, dtype=torch.long)
    changed = text.clone()
    changed[0, 10:] = 7
    assert torch.equal(model(text)[0, :10], model(changed)[0, :10])
    assert loss_of(model, (text, text)).isfinite()


def test_gap_tells_zeros_of_different_sign_apart() -> None:
    one = torch.tensor([1.0, 0.0])
    assert distance(one, one.clone()) == WeightDistance(True, 0.0, 0.0)
    assert distance(one, torch.tensor([1.0, -0.0])) == WeightDistance(False, 0.0, 0.0)


# --- the words ---


SAME = WeightDistance(True, 0.0, 0.0)


def result(over_ddp: VariantComparison, alone_loss: float = 2.5, from_ddp: WeightDistance = SAME) -> DemoResult:
    step = Spread(50, 49, 51)
    losses = {ONE: 2.3, ALONE: alone_loss, DDP: 2.3, GRADSYNC: 2.3}
    replicas = {ONE: None, ALONE: WeightDistance(False, 0.03, 0.021), DDP: SAME, GRADSYNC: SAME}
    arms = [DemoVariantResult(arm, step, 0.0, 0.0, losses[arm], replicas[arm]) for arm in VARIANTS]
    return DemoResult(2, 1, 100, 1000, 5.0, arms, from_ddp, over_ddp, VariantComparison(Spread(2, 2, 2), 20, 20), 1.0)


@pytest.mark.parametrize(
    ("slower_rounds", "ratio", "verdict"),
    [(19, 1.1, "slower."), (1, 0.9, "faster."), (12, 1.1, "no clear difference.")],
)
def test_words_on_speed_follow_the_rounds(slower_rounds: int, ratio: float, verdict: str) -> None:
    told = sentences(result(VariantComparison(Spread(ratio, ratio, ratio), slower_rounds, 20)))[3]
    assert told.startswith(f"A gradsync step took {ratio:.2f} times as long as one of DDP")
    assert f"of 20 rounds): {verdict}" in told


def test_words_draw_no_conclusion_from_times_that_others_spoiled() -> None:
    quiet = result(VariantComparison(Spread(24.9, 24, 25), 20, 20))
    told = sentences(replace(quiet, busy_cores_of_others=1.3, cores=2))
    assert told[:3] == sentences(quiet)[:3]  # what was learned is not theirs
    assert told[3].startswith("Other processes kept 1.3 of 2 cores busy meanwhile, which does not slow all arms alike")
    assert not any(word in " ".join(told) for word in ("24.9", "slower.", "faster.", "pay off"))
    assert len(told) == 4
    assert any("24.9" in sentence for sentence in sentences(quiet))


def test_words_do_not_claim_what_was_not_seen() -> None:
    told = " ".join(
        sentences(result(VariantComparison(Spread(1, 1, 1), 10, 20), 2.2, WeightDistance(False, 1e-6, 1e-7)))
    )
    assert "did not cost rank 0 any loss" in told
    assert "1.0e-07 of their norm" in told
    assert "to the last bit" not in told


def test_a_survivor_that_says_nothing_is_counted_as_such() -> None:
    fates = [
        SurvivorReport(0, "PeerLost", "rank 1 died", 0.2, True),
        SurvivorReport(2, None, "nothing, it still waits", 40.0, False),
    ]
    told = RankDeath(DDP, 1, fates).summary()
    assert told == "not every survivor knew after 40.00 s; 1 of 2 say that it was rank 1"


def slowness(blame: list[str]) -> SlowInput:
    phases = {"input": 1.0, "forward": 8.0, "backward": 16.0, "optimizer": 2.0}
    ranks = [RankTimes(0, 60.0, 30.0, phases), RankTimes(1, 60.5, 0.5, phases | {"input": 31.0})]
    return SlowInput(1, 30.0, 50, ranks, "sync costs 50 % of the step", blame)


def test_words_on_a_slow_rank_are_the_reports() -> None:
    by_stopwatch, *said = slow_sentences(slowness(["rank 1 is late"]))
    assert "60.0 ms on the fastest rank and 60.5 ms on the slowest" in by_stopwatch
    assert said == ["gradsync report: sync costs 50 % of the step", "gradsync report: rank 1 is late"]


def test_others_at_work_are_told_beside_the_report() -> None:
    told = slow_sentences(replace(slowness(["rank 1 is late"]), busy_cores_of_others=0.9, cores=2))
    assert told[:-1] == slow_sentences(slowness(["rank 1 is late"]))
    assert told[-1].startswith("Other processes kept 0.9 of 2 cores busy")


def test_a_report_that_blames_nobody_is_not_hidden() -> None:
    assert slow_sentences(slowness([]))[-1].startswith("The report blames nobody, though rank 1 was slowed")


# --- real runs ---


def test_the_story_is_true(capsys: pytest.CaptureFixture[str], temporary: Path) -> None:
    story = run_tiny(capsys, steps=6)
    arms = {arm["arm"]: arm for arm in story["arms"]}
    assert tuple(arms) == VARIANTS
    assert arms[ONE]["replicas"] is None
    assert not arms[ALONE]["replicas"]["identical"]
    assert arms[ALONE]["replicas"]["max_abs"] > 0
    assert arms[DDP]["replicas"]["identical"]
    assert arms[GRADSYNC]["replicas"]["identical"]
    assert story["gradsync_from_ddp"]["identical"]
    assert arms[DDP]["sent_mb"] == 4 * story["num_parameters"] / 1e6
    assert arms[GRADSYNC]["sent_mb"] == 0  # shared memory
    assert all(arm["validation_loss"] < story["loss_before"] for arm in story["arms"])
    # One process on the joined batch is the same training, but for rounding.
    assert arms[ONE]["validation_loss"] == pytest.approx(arms[GRADSYNC]["validation_loss"], rel=1e-4)
    assert list(temporary.iterdir()) == []


def test_another_process_at_work_is_noticed_and_nothing_is_concluded(
    capsys: pytest.CaptureFixture[str], temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[DemoResult] = []
    tell = demo._print
    monkeypatch.setattr(demo, "_print", lambda result, *how: [found.append(result), tell(result, *how)])
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            options = {"ranks": 2, "steps": 40, "kill": None, "slow": None, "slow_link": None, "json": False}
            assert demo.run(argparse.Namespace(**options, share_gpus=False, shape=TINY)) == 0
        finally:
            busy.kill()
    assert found[0].as_json()["busy_cores_of_others"] > 0.2
    words = " ".join(capsys.readouterr().out.split())
    assert "which does not slow all arms alike" in words
    assert "pay off" not in words
    assert "A gradsync step took" not in words


def test_a_killed_rank_is_named_by_gradsync(capsys: pytest.CaptureFixture[str], temporary: Path) -> None:
    deaths = {death["arm"]: death for death in run_tiny(capsys, kill=1)["deaths"]}
    assert list(deaths) == [GRADSYNC, DDP]
    [fate] = deaths[GRADSYNC]["fates"]
    assert fate["error"] == "gradsync.errors.PeerLost"
    assert "rank 1 (pid " in fate["message"]
    assert fate["names_killed_rank"]
    assert fate["seconds"] >= 0
    assert deaths[DDP]["fates"][0]["rank"] == 0
    assert list(temporary.iterdir()) == []


def test_a_slowed_rank_is_blamed_for_its_input(capsys: pytest.CaptureFixture[str], temporary: Path) -> None:
    story = run_tiny(capsys, slow=1, steps=30)
    assert [rank["rank"] for rank in story["ranks"]] == [0, 1]
    assert story["ranks"][1]["phases_ms"]["input"] >= story["slowed_ms"]  # a sleep lasts at least so long
    [blame] = story["blame"]
    assert blame.startswith("rank 1 (host ")
    assert "in its input pipeline" in blame
    assert story["verdict"]
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_demo_is_quiet_and_leaves_nothing(number: signal.Signals, code: int, tmp_path: Path) -> None:
    # A shell starts background jobs with SIGINT ignored, and children inherit that: listen again.
    listen = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{listen}; from gradsync.cli.main import main; sys.exit(main(['demo']))"]
    env = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stderr is not None
            while "0 of 480" not in process.stderr.readline():
                assert process.poll() is None
            os.killpg(process.pid, number)  # as a terminal does: to all processes of the session
            assert process.wait(60) == code
            # The end of this stream comes only when every rank, which shares it, has ended.
            assert process.stderr.read() == ""
            assert list(tmp_path.iterdir()) == []
        finally:
            process.kill()
