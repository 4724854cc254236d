"""`gradsync bench`: bad input gets a sentence, every result is checked, however the ranks were started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradsync.cli import local_ranks
from gradsync.cli.bench import command as bench
from gradsync.cli.bench import hardware
from gradsync.cli.bench.all_reduce_variants import VARIANTS, AllReduceVariant, choose_variants, parse_variants
from gradsync.cli.bench.bench_config import DTYPES, BenchConfig
from gradsync.cli.bench.bench_result import BenchResult, Cell, read_result
from gradsync.cli.bench.bench_worker import RESULTS, measure, run_bench
from gradsync.cli.bench.call_timer import clock
from gradsync.cli.bench.draw_schedule import RECIPES
from gradsync.cli.bench.expected_sums import ExpectedSums
from gradsync.cli.bench.mpirun import missing_mpi, run_under_mpirun
from gradsync.cli.bench.plot import plot
from gradsync.cli.bench.rank_barrier import open_barrier
from gradsync.cli.bench.sizes import parse_sizes, show_size
from gradsync.cli.bench.text import sentences, tables
from gradsync.cli.main import main
from gradsync.errors import GradSyncError
from gradsync.launch.spawn import RankPool

Run = Callable[..., list[Any]]

KEYS = {"command", "ranks", "dtype", "machine", "memory_bandwidth", "cells"}
CELL_KEYS = {
    *("arm", "algorithm", "dtype", "nbytes", "cache", "busy", "time_s", "low_s", "high_s"),
    *("algbw", "busbw", "wrong", "bound_fraction", "samples"),
}

no_mpi = missing_mpi()
needs_mpi = pytest.mark.skipif(no_mpi is not None, reason=f"no MPI: {no_mpi}")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Temporary files are made here, so that one can see what is left of them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def run_tiny(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """The command on 2 ranks; its JSON."""
    assert main(["bench", "--ranks", "2", "--rounds", "2", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


# --- input ---


def test_sizes_are_lists_and_ranges() -> None:
    assert parse_sizes("1K..256M") == tuple(1024 * 4**power for power in range(10))
    assert parse_sizes(" 25M, 1kb ,7,1K") == (7, 1024, 25 * 2**20)
    assert parse_sizes("1K..10K,2G") == (1024, 4096, 2**31)
    assert [show_size(size) for size in parse_sizes("7,1K,25M,2G")] == ["7", "1K", "25M", "2G"]


def test_peers_are_always_there_and_arms_suit_the_hosts() -> None:
    assert choose_variants(None, one_host=True, mpi=True) == ("gloo", "mpi", "shared", "any")
    assert choose_variants(None, one_host=False, mpi=False) == ("gloo", "hierarchical", "ring", "auto")
    assert choose_variants(parse_variants("tree,gloo,tree"), one_host=True, mpi=False) == ("gloo", "tree")
    assert choose_variants(None, one_host=True, mpi=False, gpus=True) == ("nccl", "auto", "ring")
    every, host_memory = parse_variants("all"), {"gloo", "mpi", "shared", "any"}
    assert set(choose_variants(every, one_host=True, mpi=True)) == set(VARIANTS) - {"nccl"}
    assert set(choose_variants(every, one_host=False, mpi=False)) == set(VARIANTS) - {"nccl", "mpi", "shared", "any"}
    assert set(choose_variants(every, one_host=True, mpi=False, gpus=True)) == set(VARIANTS) - host_memory


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ranks", "1"], "argument --ranks: needs a whole number from 2 to 64, got '1'"),
        (["--sizes", "1Q"], "argument --sizes: '1Q' is no size: write bytes, or a number with K, M or G"),
        (["--sizes", "4M..1K"], "argument --sizes: the range 4M..1K is empty"),
        (["--sizes", "0"], "argument --sizes: 0 is out of range: sizes go from 1 byte to 16G"),
        (["--sizes", "10"], "10 is no whole number of fp32 elements: choose a multiple of 4 bytes"),
        (["--dtype", "fp8"], "argument --dtype: invalid choice: 'fp8'"),
        (["--algorithms", "star"], "argument --algorithms: 'star' is no algorithm: choose from gloo, mpi"),
        (["--algorithms", "mpi", "--no-mpi"], "mpi cannot take part: --no-mpi leaves it out"),
        (["--algorithms", "mpi", "--dtype", "bf16"], "mpi cannot take part: mpi4py cannot add bf16"),
        (["--rounds", "0"], "argument --rounds: needs a whole number from 1"),
        (["--plot", "/nowhere/bench.svg"], "--plot /nowhere/bench.svg cannot be written"),
        (["--hosts", "2x4"], "--hosts is for --draw"),
        (["--svg", "tree.svg"], "--svg is for --draw"),
        (["--draw", "shared_memory"], "argument --draw: invalid choice: 'shared_memory'"),
        (["--draw", "tree", "--hosts", "2by4"], "argument --hosts: needs hosts as in 2x4 or 4,3"),
        (["--draw", "tree", "--hosts", "2x4", "--ranks", "4"], "--hosts has 8 ranks, --ranks 4"),
    ],
)
def test_bad_input_ends_with_2_and_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"gradsync bench: {sentence}")
    assert err.count("\n") == 1


def test_too_much_memory_is_refused_with_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "free_memory_nbytes", lambda: 2**30)
    assert main(["bench", "--no-mpi", "--algorithms", "native", "--ranks", "2", "--sizes", "256M"]) == 2
    err = capsys.readouterr().err
    needed = 2 * (2 * 2**28 + bench.sweep_nbytes()) / 2**30
    assert f"256M on 2 ranks needs {needed:.1f} GiB of memory, 1.0 GiB are free" in err


def test_the_machine_is_known() -> None:
    assert hardware.free_memory_nbytes() > 0
    assert hardware.last_level_cache_nbytes() >= 2**15


# --- drawing ---


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_be_drawn(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "--draw", name, "--hosts", "2x4"]) == 0
    assert capsys.readouterr().out.startswith("8 ranks, ")
    assert main(["bench", "--draw", name, "--ranks", "3", "--svg", str(tmp_path / "drawn.svg")]) == 0
    assert capsys.readouterr().out == ""
    assert ElementTree.parse(tmp_path / "drawn.svg").getroot().tag.endswith("svg")


# --- the expected sums ---


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("ranks", [2, 7])
def test_sums_are_exact_in_any_order(dtype: torch.dtype, ranks: int) -> None:
    truths = [ExpectedSums(rank, ranks, dtype) for rank in range(ranks)]
    for numel in (1, 1000, 200_000):
        parts = torch.empty(ranks, numel, dtype=dtype)
        for expected, part in zip(truths, parts, strict=True):
            expected.fill(part)
        for order in (range(ranks), reversed(range(ranks))):
            total = torch.zeros(numel, dtype=dtype)
            for rank in order:
                total += parts[rank]
            assert [expected.count_wrong(total) for expected in truths] == [0] * ranks
        total[numel // 2] += 1
        assert truths[0].count_wrong(total) == 1


def test_numbers_in_the_wrong_place_are_wrong() -> None:
    expected = ExpectedSums(0, 1, torch.float32)
    numbers = torch.empty(2**17)
    expected.fill(numbers)
    assert expected.count_wrong(numbers) == 0
    assert expected.count_wrong(numbers.roll(2**16)) > 2**16
    numbers[5] = float("nan")
    assert expected.count_wrong(numbers) == 1


# --- what ranks do ---


def leave_out_the_last(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor[:-1])


def lose_a_round(tensor: torch.Tensor, calls: list[int]) -> None:
    calls.append(1)
    dist.all_reduce(tensor)
    if len(calls) == 2 and dist.get_rank() == 1:
        tensor[3] += 1


def measure_broken_arms(config: str) -> list[dict[str, Any]]:
    calls: list[int] = []
    arms = {
        "gloo": VARIANTS["gloo"],
        "short": AllReduceVariant("short", "", lambda tensor: partial(leave_out_the_last, tensor)),
        "once": AllReduceVariant("once", "", lambda tensor: partial(lose_a_round, tensor, calls)),
    }
    lines: list[dict[str, Any]] = []
    measure(BenchConfig.from_json(config), arms, lines.append)
    return lines


def test_a_wrong_result_is_counted(run: Run) -> None:
    config = BenchConfig((131072,), "fp32", ("gloo", "short", "once"), rounds=3)  # each call alone, and checked
    lines, elsewhere = run(measure_broken_arms, config.as_json())
    assert elsewhere == []
    assert lines[0]["memory_bandwidth"] > 0
    wrong = {cell["arm"]: cell["wrong"] for cell in lines[1]["cells"]}
    # The last element in four rounds on two ranks; one element in one round on one rank.
    assert wrong == {"gloo": 0, "short": 8, "once": 1}


def arrive_often() -> list[tuple[float, float]]:
    times = []
    with open_barrier(one_host=True) as barrier:
        for _ in range(200):
            before = time.monotonic()
            barrier.arrive()
            times.append((before, time.monotonic()))
    return times


def test_nobody_passes_the_gate_before_all_have_come(run: Run) -> None:
    for turn in zip(*run(arrive_often, ranks=3), strict=True):
        assert max(before for before, _ in turn) <= min(after for _, after in turn)


def test_a_busy_clock_calls_from_a_side_thread_and_passes_errors_on() -> None:
    threads: list[threading.Thread] = []
    with clock(busy=True) as watch:
        for _ in range(3):
            assert watch(lambda: None, lambda: threads.append(threading.current_thread())) >= 0
        with pytest.raises(ZeroDivisionError):
            watch(lambda: None, lambda: 1 / 0)
    with clock(busy=True) as watch, pytest.raises(ZeroDivisionError):
        watch(lambda: 1 / 0, lambda: None)
    assert len(set(threads)) == 1
    assert threads[0] is not threading.main_thread()


# --- the words and the picture ---


def example(wrong: int = 0) -> BenchResult:
    cells = [
        Cell(arm, nbytes, cache, False, (nbytes * 1e-9 * factor, nbytes * 3e-9 * factor), wrong if arm == "any" else 0)
        for cache in ("warm", "cold")
        for nbytes in (2**10, 2**20)
        for arm, factor in (("gloo", 4), ("any", 1))
    ]
    return BenchResult(2, "fp32", {}, 2e10, tuple(cells))


def test_derived_numbers_follow_from_samples() -> None:
    result = example()
    cell = next(cell for cell in result.as_json()["cells"] if cell["arm"] == "any" and cell["nbytes"] == 2**20)
    assert cell["time_s"] == pytest.approx(2**20 * 2e-9)
    assert (cell["low_s"], cell["high_s"]) == pytest.approx((2**20 * 1.5e-9, 2**20 * 2.5e-9))
    assert cell["algbw"] == pytest.approx(0.5e9)
    assert cell["busbw"] == cell["algbw"]  # on 2 ranks
    assert cell["bound_fraction"] == pytest.approx(0.1)
    assert cell["algorithm"] == "shared_memory"


def test_table_has_a_line_for_each_cell() -> None:
    warm, cold = tables(example())
    assert warm.title == "fp32 on 2 ranks, warm caches, main thread idle"
    assert cold.title == "fp32 on 2 ranks, cold caches, main thread idle"
    columns = [list(column.cells) for column in warm.columns]
    assert columns[0] == ["1K", "", "1M", ""]
    assert columns[1] == ["gloo", "any"] * 2
    assert columns[2][3] == "2.10 ms (1.57 ms – 2.62 ms)"
    assert columns[6] == ["-", "4.00"] * 2


def test_words_tell_what_was_wrong() -> None:
    assert sentences(example())[-1] == "All 24 results were right on every rank, element by element."
    told = sentences(example(wrong=3))
    assert "any was WRONG at 1M: 3 elements; please report this." in told
    assert not any("were right" in sentence for sentence in told)


@pytest.mark.parametrize(("busy", "warned"), [(None, False), (0.05, False), (1.4, True)])
def test_a_disturbed_comparison_is_called_one(busy: float | None, warned: bool) -> None:
    told = sentences(replace(example(), machine={"cores": 2, "busy_cores_of_others": busy}))
    assert any("DO NOT COMPARE" in sentence for sentence in told) == warned


def test_wrong_results_end_with_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "run_alone", lambda *_, **__: example(wrong=3))
    assert main(["bench", "--no-mpi", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["cells"][1]["wrong"] == 3
    assert main(["bench", "--no-mpi"]) == 1
    assert "any was WRONG" in capsys.readouterr().out


def test_plot_has_a_line_for_each_arm_and_cache_and_the_bound() -> None:
    root = ElementTree.fromstring(plot(example()))
    paths = [element.get("class", "") for element in root.iter("{http://www.w3.org/2000/svg}path")]
    assert sum(name.startswith("series") for name in paths) == 2 * 4  # and in the key
    assert paths.count("bound") == 2
    labels = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"gloo, warm", "any, cold", "bound by memory", "1K", "1M"} <= set(labels)


def test_plot_of_one_size_across_hosts_has_no_bound() -> None:
    picture = plot(BenchResult(2, "fp32", {}, None, (Cell("gloo", 1024, "warm", False, (1e-4,), 0),)))
    assert ElementTree.fromstring(picture) is not None
    assert 'class="bound"' not in picture


def test_lines_of_a_rank_become_a_result() -> None:
    cell = {"arm": "gloo", "nbytes": 8, "cache": "warm", "busy": False, "samples": [1.0, 2.0], "wrong": 0}
    lines = [json.dumps(line) for line in ({"memory_bandwidth": None}, {"cells": [cell]}, {"busy_cores": 0.5})]
    result = read_result(lines, ranks=4, dtype="fp64", machine={})
    assert result.cells == (Cell("gloo", 8, "warm", False, (1.0, 2.0), 0),)
    assert result.as_json()["cells"][0]["bound_fraction"] is None
    assert result.as_json()["machine"] == {"busy_cores_of_others": 0.5}


# --- real runs ---


def check(report: Any, arms: list[str], cells: int) -> None:
    assert set(report) == KEYS
    assert report["ranks"] == 2
    assert report["memory_bandwidth"] > 0
    assert report["machine"]["busy_cores_of_others"] >= 0
    assert len(report["cells"]) == cells
    assert list(dict.fromkeys(cell["arm"] for cell in report["cells"])) == arms
    for cell in report["cells"]:
        assert set(cell) == CELL_KEYS
        assert cell["wrong"] == 0
        assert len(cell["samples"]) == 2
        assert 0 < cell["low_s"] <= cell["time_s"] <= cell["high_s"]


def test_a_bench_of_own_ranks(
    capsys: pytest.CaptureFixture[str], temporary: Path, monkeypatch: pytest.MonkeyPatch, warm: ForkServerContext
) -> None:
    monkeypatch.setattr(local_ranks, "RankPool", partial(RankPool, context=warm))
    picture = temporary / "bench.svg"
    arguments = ["--no-mpi", "--algorithms", "native", "--sizes", "1K,300K", "--cache", "both", "--busy"]
    report = run_tiny(capsys, *arguments, "--plot", str(picture))
    check(report, ["gloo", "native"], cells=2 * 2 * 2 * 2)
    assert {(cell["cache"], cell["busy"]) for cell in report["cells"]} == {
        (cache, busy) for cache in ("warm", "cold") for busy in (False, True)
    }
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert list(temporary.iterdir()) == [picture]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int64"])
def test_every_arm_is_right(dtype: str, run: Run, tmp_path: Path) -> None:
    arms = choose_variants(parse_variants("all"), one_host=True, mpi=False)
    config = BenchConfig((8, 2**20), dtype, arms, rounds=2)
    run(run_bench, config.as_json(), str(tmp_path), ranks=3)
    result = read_result((tmp_path / RESULTS).read_text().splitlines(), 3, dtype, {})
    assert [cell.arm for cell in result.cells] == [*arms, *arms]
    assert [cell.wrong for cell in result.cells] == [0] * 2 * len(arms)


@needs_mpi
def test_mpi_takes_part_in_the_same_processes(capsys: pytest.CaptureFixture[str], temporary: Path) -> None:
    report = run_tiny(capsys, "--algorithms", "native", "--sizes", "1K,300K", "--dtype", "int32")
    check(report, ["gloo", "mpi", "native"], cells=6)
    assert list(temporary.iterdir()) == []


@needs_mpi
def test_what_ranks_of_mpirun_say_when_they_fail_is_told(tmp_path: Path) -> None:
    with pytest.raises(GradSyncError, match=r"(?s)mpirun ended with \d+; --no-mpi does without it.*JSONDecodeError"):
        run_under_mpirun("no question", 2, 1, str(tmp_path), timeout=60)


def test_under_torchrun_every_process_is_a_rank(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--no-python", str(Path(sys.executable).parent / "gradsync"), "bench"]
    command += ["--algorithms", "native", "--sizes", "1K", "--rounds", "2", "--json"]
    env = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=env)
    assert done.returncode == 0, done.stderr
    check(json.loads(done.stdout), ["gloo", "native"], cells=2)


def test_another_number_of_ranks_than_the_launcher_started_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    assert main(["bench", "--ranks", "3"]) == 2
    assert capsys.readouterr().err == "gradsync bench: --ranks 3, but torchrun started 2: leave --ranks out\n"


@pytest.mark.parametrize(
    "arguments", [["--no-mpi"], pytest.param([], marks=needs_mpi)], ids=["own ranks", "ranks of mpirun"]
)
def test_an_interrupted_bench_is_quiet_and_leaves_nothing(arguments: list[str], tmp_path: Path) -> None:
    # A shell starts background jobs with SIGINT ignored, and children inherit that: listen again.
    listen = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    asked = ["bench", "--ranks", "2", "--algorithms", "native", "--sizes", "1K,64M", *arguments]
    code = f"{listen}; from gradsync.cli.main import main; sys.exit(main({asked}))"
    env = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stderr is not None
            while "1 of 4" not in process.stderr.readline():  # the ranks are at work
                assert process.poll() is None
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(60) == 130
            assert "Traceback" not in process.stderr.read()
            assert list(tmp_path.iterdir()) == []
        finally:
            process.kill()
