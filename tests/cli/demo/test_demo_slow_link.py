"""`gradsync demo --slow-link`: gradients go over the link, a refusal is a sentence, and nothing is left behind."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from rich.console import Console

from gradsync.cli import local_ranks
from gradsync.cli.demo import command as demo
from gradsync.cli.demo.slow_link import namespaces, privileges
from gradsync.cli.demo.slow_link.link_result import LinkResult, sum_up
from gradsync.cli.demo.slow_link.link_variants import VARIANTS
from gradsync.cli.demo.slow_link.shaped_link import NoLink, Shaper, try_out
from gradsync.cli.demo.slow_link.text import sentences, table
from gradsync.cli.demo.slow_link.train_over_link import LinkRecord
from gradsync.cli.demo.story.demo_model import DemoShape
from gradsync.cli.demo.story.train_variants import ALONE, DDP, GRADSYNC
from gradsync.cli.main import main
from gradsync.cli.shared import BadInput
from gradsync.launch.spawn import RankPool

SMALL = DemoShape(layers=2, width=64, heads=2, context=16, batch=2)
RATE = "100mbit"
SETFCAP = 31

# A shell starts background jobs with SIGINT ignored, and children inherit that: listen again.
LISTEN = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
GRADSYNC_MAIN = f"{LISTEN}; from gradsync.cli.main import main; sys.exit(main(sys.argv[1:]))"

# Without the right to make networks, as an ordinary user is; with {kept}, which root needs to be root again inside.
ORDINARY = """
import ctypes, os, sys
for capability in set(range(64)) - {kept}:
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
os.execv(sys.executable, [sys.executable, "-c", *sys.argv[1:]])
"""


@pytest.fixture
def may_link() -> None:
    """Skipped where this process cannot make a link itself."""
    if missing := namespaces.missing_capabilities():
        pytest.skip(f"no slow link: making networks needs {' and '.join(missing)}")
    try:
        try_out(Shaper.of(RATE))
    except (NoLink, OSError) as error:
        pytest.skip(f"no slow link: {error}")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Temporary files are made here, so that one can see what is left of them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


# --- input ---


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["fast"], "argument --slow-link: needs a rate from 10mbit to 10gbit, such as 100mbit, got 'fast'"),
        (["1mbit"], "argument --slow-link: needs a rate from 10mbit to 10gbit, such as 100mbit, got '1mbit'"),
        (["11gbit"], "argument --slow-link: needs a rate from 10mbit to 10gbit, such as 100mbit, got '11gbit'"),
        (["-5mbit"], "argument --slow-link: expected one argument"),
        ([RATE, "--ranks", "4"], "--slow-link joins 2 ranks, and kills none: leave out --ranks and --kill"),
        ([RATE, "--kill", "1"], "--slow-link joins 2 ranks, and kills none: leave out --ranks and --kill"),
    ],
)
def test_bad_input_ends_with_2_and_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--slow-link", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"gradsync demo: {sentence}")
    assert err.count("\n") == 1


# --- where there can be no link ---


@pytest.mark.parametrize(
    ("setting", "forbids", "way_out"),
    [
        (
            "kernel/unprivileged_userns_clone",
            "0\n",
            "sudo sysctl kernel.unprivileged_userns_clone=1, or run this as root",
        ),
        ("kernel/apparmor_restrict_unprivileged_userns", "1\n", "sudo sysctl kernel.apparmor_restrict_unprivileged"),
        ("user/max_user_namespaces", "0\n", "sudo sysctl user.max_user_namespaces=10000, or run this as root"),
    ],
)
def test_a_setting_that_forbids_is_named(setting: str, forbids: str, way_out: str, tmp_path: Path) -> None:
    file = tmp_path / setting
    file.parent.mkdir()
    file.write_text(forbids)
    told = namespaces.explain(OSError(errno.EPERM, "unshare: Operation not permitted"), tmp_path)
    assert told.startswith("user namespaces are switched off here (")
    assert way_out in told


def test_other_refusals_are_told_apart(tmp_path: Path) -> None:
    refused = namespaces.explain(OSError(errno.EPERM, "unshare: Operation not permitted"), tmp_path)
    assert (
        "(unshare: Operation not permitted): run this as root, and in a container with --cap-add SYS_ADMIN" in refused
    )
    assert "run this on another Linux" in namespaces.explain(
        OSError(errno.EINVAL, "unshare: Invalid argument"), tmp_path
    )


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (NoLink("this kernel has no sch_tbf"), "this kernel has no sch_tbf: load that module as root"),
        (OSError(errno.EINVAL, "unshare: Invalid argument"), "this kernel cannot make a network"),
    ],
)
def test_a_kernel_that_cannot_is_said_before_ranks_start(
    error: Exception, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Shaper) -> None:
        raise error

    monkeypatch.setattr(privileges, "try_out", refuse)
    with pytest.raises(BadInput, match=sentence):
        privileges.check_link(Shaper.of(RATE))


def test_where_user_namespaces_are_refused_it_ends_with_2_and_the_reason() -> None:
    """In a user namespace that allows no other, by a process without rights in it."""
    allow_none = f"""
import os, sys
sys.path.insert(0, {os.path.dirname(namespaces.__file__)!r})
import namespaces
try:
    namespaces.enter_user_namespace()
except OSError as error:
    sys.exit(f"refused: {{error}}")
open("/proc/sys/user/max_user_namespaces", "w").write("0")
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
    inner = ["-c", ORDINARY.format(kept={SETFCAP}), GRADSYNC_MAIN, "demo", "--slow-link", RATE]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", allow_none, *inner], capture_output=True, text=True, timeout=100
    )
    if done.stderr.startswith("refused"):
        pytest.skip(f"no user namespace to try this in, {done.stderr.strip()}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "gradsync demo: there can be no slow link here, user namespaces are switched off here "
        "(user.max_user_namespaces = 0): sudo sysctl user.max_user_namespaces=10000, or run this as root\n"
    )


# --- the words ---


def result(
    compressed_s: float, loss: float, exact_s: float = 1.0, quickest_s: float | None = None, busy_cores: float = 0.0
) -> LinkResult:
    """`quickest_s`: of PowerSGD, if not as the others."""
    seconds = {ALONE: 0.25, DDP: 1.0, GRADSYNC: exact_s}

    def record(name: str) -> LinkRecord:
        if name in seconds:
            return LinkRecord([seconds[name]] * 3, [13_000_000] * 3, 3.0)
        step_s = compressed_s if quickest_s is None or "powersgd" not in name else quickest_s
        return LinkRecord([step_s] * 3, [300_000] * 3, loss)

    return sum_up([{name: record(name) for name in VARIANTS}] * 2, RATE, 1, 8, 3_000_000, busy_cores)


def test_a_gain_is_said_with_its_reason() -> None:
    told = sentences(result(0.25, 3.01))
    assert "compression makes a step 4.0 times as fast" in told[0]
    assert "it sends 0.30 MB where DDP without compression sends 13.00" in told[0]
    assert told[1].endswith("that is why compress=None is the default.")
    assert "8 steps do not tell (none of these fell behind by 1 %)" in told[2]


def test_the_headline_is_the_fastest_whose_loss_was_measured_within_1_percent() -> None:
    found = result(0.25, 3.0, quickest_s=0.05)
    assert found.compressed[0].arm == "gradsync powersgd(4)"
    assert found.best.arm in ("gradsync int8()", "gradsync int4()")
    told = sentences(found)
    assert "compression makes a step 4.0 times as fast (gradsync int" in told[0]
    assert "measured within 1 %" in told[0]
    assert "gradsync int8() +0.01 %, gradsync int4() +0.31 %, gradsync powersgd(4) +18 %" in told[2]


def test_every_compressed_arm_has_a_measured_loss_and_its_column_shows_it() -> None:
    found = result(0.25, 3.0)
    assert all(arm.measured_worse is not None for arm in found.compressed)
    assert [arm.arm for arm in found.arms if arm.measured_worse is None] == [ALONE, DDP, "DDP, fp16 hook", GRADSYNC]
    console = Console(width=100, file=io.StringIO())
    console.print(table(found))
    assert "+18 %" in console.file.getvalue()  # type: ignore[attr-defined]


def test_no_gain_is_not_called_one() -> None:
    assert sentences(result(1.2, 3.0))[0].startswith("On this link compression buys nothing")


def test_what_gradsync_gains_without_compression_is_not_counted() -> None:
    assert sentences(result(0.5, 3.0, exact_s=0.5))[0].startswith("On this link compression buys nothing")


def test_who_learned_less_is_named() -> None:
    assert "of these only gradsync int8() and gradsync int4()" in sentences(result(0.25, 3.5))[2]


def test_times_that_others_spoiled_are_not_concluded_from() -> None:
    told = sentences(result(0.25, 3.0, busy_cores=0.7))
    assert told[0].startswith("Other processes kept 0.7 of")
    assert len(told) == 2
    assert "times as fast" not in " ".join(told)


# --- real runs ---


@pytest.mark.usefixtures("may_link")
def test_gradients_go_over_the_link(
    capsys: pytest.CaptureFixture[str], temporary: Path, monkeypatch: pytest.MonkeyPatch, warm: ForkServerContext
) -> None:
    monkeypatch.setattr(local_ranks, "RankPool", partial(RankPool, context=warm))
    before = _links()
    options = {"ranks": 2, "kill": None, "slow": None, "slow_link": RATE, "steps": 6, "json": True, "shape": SMALL}
    assert demo.run(argparse.Namespace(**options, share_gpus=False)) == 0
    told = json.loads(capsys.readouterr().out)
    facts = ["command", "rate", "threads_per_rank", "steps", "num_parameters", "arms"]
    assert list(told) == [*facts, "busy_cores_of_others", "cores"]
    arms = {arm["arm"]: arm for arm in told["arms"]}
    assert tuple(arms) == tuple(VARIANTS)
    fields = {"arm", "step_ms", "times_as_fast_as_ddp", "sent_mb", "validation_loss", "measured_worse"}
    assert set(arms[DDP]) == fields
    assert arms[DDP]["times_as_fast_as_ddp"] == 1
    whole = 4 * told["num_parameters"] / 1e6
    batches = {name: arm["sent_mb"] / whole for name, arm in arms.items()}
    assert batches[ALONE] < 0.01
    assert batches[DDP] == pytest.approx(1, abs=0.05)
    assert batches["DDP, fp16 hook"] == pytest.approx(1 / 2, abs=0.05)
    assert batches[GRADSYNC] == pytest.approx(1, abs=0.05)
    assert batches["gradsync int8()"] == pytest.approx(1 / 4, abs=0.05)
    assert batches["gradsync int4()"] == pytest.approx(1 / 8, abs=0.05)
    # Two ranks, no compressor: the same sums as DDP's.
    assert arms[GRADSYNC]["validation_loss"] == arms[DDP]["validation_loss"]
    assert _links() == before
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("ordinary", "number", "code"),
    [(False, signal.SIGINT, 130), (True, signal.SIGKILL, -9)],
)
@pytest.mark.usefixtures("may_link")
def test_an_interrupted_demo_leaves_nothing(ordinary: bool, number: signal.Signals, code: int, tmp_path: Path) -> None:
    before = _links()
    start = [ORDINARY.format(kept={SETFCAP}), GRADSYNC_MAIN] if ordinary else [GRADSYNC_MAIN]
    command = [sys.executable, "-c", *start, "demo", "--slow-link", "10gbit", "--steps", "6"]
    env = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stderr is not None
            while not re.search(r"[1-9]\d* of 48", line := process.stderr.readline()):
                assert line, "it ended before it trained"
            assert len(_networks()) >= 3  # the root's, and one for each rank
            os.kill(process.pid, number)
            assert process.wait(60) == code
            # The end of this stream comes only when every rank, which shares it, has ended.
            process.stderr.read()
        finally:
            process.kill()
    assert _links() == before
    if number != signal.SIGKILL:  # which leaves nobody to remove files
        assert list(tmp_path.glob("gradsync*")) == []  # torch keeps a cache there


def _links() -> tuple[list[str], list[str]]:
    """The interfaces out here, and the namespaces that have a name."""
    named = Path("/run/netns")
    return sorted(os.listdir("/sys/class/net")), sorted(os.listdir(named)) if named.exists() else []


def _networks() -> set[int]:
    """Every network that a process is in."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            found.add(os.stat(folder / "ns/net").st_ino)
    return found
