"""What `gradsync plan` prints and refuses, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from planned import SMALL, Capture, refusal, say, tiny_profile, wired

import gradsync as gs
from gradsync.cluster import Cluster, Device, Link, as_hosts

KEYS = {"command", "version", "calibrated", "cluster", "profile", "answer", "candidates"}
CANDIDATE_KEYS = {
    *("plan", "words", "step_s", "low_s", "high_s", "compute_s", "exposed_s", "overhead", "bytes", "memory_bytes"),
    *("quality", "reason"),
}


# --- what is printed ---


def test_it_says_what_it_rests_on(capsys: Capture) -> None:
    told = " ".join(say(capsys, *SMALL).split())
    assert "From the catalogue, not validated" in told
    assert "line rate 100 Gbit/s = 12.5 GB/s, of which 11 GB/s" in told
    assert "100 million parameters, 400 MB of float32 gradients" in told
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
    page = (Path(__file__).parents[3] / "docs" / "planning.md").read_text()
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
