"""Ranks on one GPU, as far as no GPU is needed: sentences, variables, and NVIDIA's server, played by a script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradsync as gs
from gradsync.errors import LaunchError
from gradsync.launch import choose_backend
from gradsync.launch.choose_backend import default_backend
from gradsync.launch.roster import RankPlacement, RankRecord, refusal, shares_over_nccl
from gradsync.launch.shared_gpus import Mps, nccl_variables, sharing_allowed, sharing_refusal, take_gpu
from gradsync.launch.spawn import RankPool

# The daemon: says its pid where NVIDIA's does, and ends when it is told to.
DAEMON = """#!/bin/sh
pid="$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"
if [ "$1" = -d ]; then
    [ -z "$BROKEN" ] || { echo "An instance of this daemon is already running"; exit 1; }
    setsid sleep 1000 >/dev/null 2>&1 &
    echo $! > "$pid"
    echo "$! $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY ${CUDA_VISIBLE_DEVICES:-all}" >> "$TOLD"
else
    read -r command
    echo "$command" >> "$TOLD"
    kill "$(cat "$pid")"
fi
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the daemon was told, a line each; `nvidia-cuda-mps-control` is our script."""
    program, told = tmp_path / "bin" / "nvidia-cuda-mps-control", tmp_path / "told"
    program.parent.mkdir()
    program.write_text(DAEMON)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("TOLD", str(told))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    return told


def ended(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


def start_of(told: Path) -> tuple[int, str, str, str]:
    pid, pipe, log, gpus = told.read_text().splitlines()[0].split()
    return int(pid), pipe, log, gpus


def test_mps_lives_as_long_as_its_with(told: Path) -> None:
    with Mps() as mps:
        pid, pipe, log, gpus = start_of(told)
        assert not ended(pid)
        assert mps.environment == {"CUDA_MPS_PIPE_DIRECTORY": pipe, "CUDA_MPS_LOG_DIRECTORY": log}
        assert gpus == "all"
        assert Path(log).is_dir()
    assert ended(pid)
    assert told.read_text().splitlines()[1:] == ["quit -t 5"]
    assert not Path(pipe).parent.exists()


def test_mps_ends_on_an_error(told: Path) -> None:
    with pytest.raises(ZeroDivisionError), Mps():
        1 / 0  # noqa: B018
    assert ended(start_of(told)[0])


def test_mps_ends_with_a_process_that_is_killed(told: Path) -> None:
    script = (
        "import os, signal\n"
        "from gradsync.launch.shared_gpus import Mps\n"
        "with Mps():\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=100, check=False).returncode == -signal.SIGKILL
    pid, pipe, _, _ = start_of(told)
    deadline = time.monotonic() + 60
    while not ended(pid) or Path(pipe).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_mps_that_does_not_start_is_a_sentence(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKEN", "1")
    mps = Mps()
    with pytest.raises(LaunchError, match=r"-d failed \(An instance of this daemon is already running\): let ranks"):
        mps.__enter__()
    assert not Path(mps.environment["CUDA_MPS_PIPE_DIRECTORY"]).parent.exists()


def test_without_the_program_mps_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="there is no nvidia-cuda-mps-control in PATH"), Mps():
        pass


def test_every_rank_that_shares_a_gpu_is_a_host() -> None:
    gpus = ["a", "b", "a"]
    every = {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "=eth0"}
    assert nccl_variables(2, gpus, "eth0", {}) == every | {"NCCL_HOSTID": "gradsync-rank-2"}
    assert nccl_variables(1, gpus, "eth0", {}) == every
    assert nccl_variables(1, ["a", "b"], "eth0", {}) == {}
    assert nccl_variables(0, gpus, None, {"NCCL_IB_DISABLE": "0"}) == {"NCCL_HOSTID": "gradsync-rank-0"}
    assert nccl_variables(0, gpus, None, {"NCCL_IB_DISABLE": "0", "NCCL_HOSTID": "mine"}) == {}
    inherited = {"NCCL_IB_DISABLE": "0", "NCCL_HOSTID": "gradsync-rank-7"}
    assert nccl_variables(0, gpus, None, inherited) == {"NCCL_HOSTID": "gradsync-rank-0"}


@pytest.mark.parametrize(
    ("host_ids", "versions", "sentence"),
    [
        ((None, None, None), ((2, 28, 9),) * 3, None),
        ((None, "x", "x"), ((2, 14, 0),) * 3, None),  # rank 1 shares none
        (("x", None, "x"), ((2, 28, 9),) * 3, "ranks 0 and 2 share GPUs and both have NCCL_HOSTID=x"),
        (("x", None, "y"), ((2, 13, 4),) * 3, "from NCCL 2.14 on, and rank 0 has 2.13.4: install a newer torch"),
        ((None, None, None), (None,) * 3, None),
    ],
)
def test_what_keeps_ranks_from_sharing_is_a_sentence(
    host_ids: tuple[str | None, ...], versions: tuple[tuple[int, ...] | None, ...], sentence: str | None
) -> None:
    said = sharing_refusal(["a", "b", "a"], host_ids, versions)
    assert said is None if sentence is None else sentence in (said or "")


def roster(*, share: tuple[bool, bool] = (True, True), **record: Any) -> tuple[list[RankRecord], list[RankPlacement]]:
    fields = {"hostname": "vm", "host": "h", "network": "n", "towards_master": None, "backend": None} | record
    peers = [RankRecord(**fields, share_gpus=each) for each in share]
    return peers, [RankPlacement("lo", "127.0.0.1", "g", None, [2, 28, 9]) for _ in share]


def test_ranks_on_one_gpu_use_nccl_where_all_allow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_backend, "nccl_lack", lambda: None)
    assert default_backend(["g", "g"], share_gpus=True) == ("cpu:gloo,cuda:nccl", None)
    for backend in (None, "nccl"):
        assert refusal(*roster(backend=backend)) is None
        assert shares_over_nccl(*roster(backend=backend))
    assert not shares_over_nccl(*roster(backend="cpu:gloo,cuda:gloo"))
    assert not shares_over_nccl(*roster(share=(False, False)))
    told = refusal(*roster(share=(False, True)))
    assert told is not None
    assert told.startswith("rank 1 lets ranks share a GPU over NCCL, rank 0 does not")
    assert "ranks 0 and 1 share GPUs and both have NCCL_HOSTID=x" in (refusal(*roster(host_id="x")) or "")
    note = default_backend(["g", "g"])[1]
    assert note is not None
    assert "gs.init(share_gpus=True) or GRADSYNC_SHARE_GPUS=1 lets NCCL do it, for tests" in note
    assert "or, for tests, gs.init(share_gpus=True)" in (refusal(*roster(share=(False, False), backend="nccl")) or "")


def test_bad_switches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="share_gpus must be True or False, got 'yes'"):
        gs.init(share_gpus="yes")  # type: ignore[arg-type]
    monkeypatch.setenv("GRADSYNC_SHARE_GPUS", "yes")
    with pytest.raises(ValueError, match="GRADSYNC_SHARE_GPUS must be 1, or 0 or unset, got 'yes'"):
        gs.init()
    assert not dist.is_initialized()
    assert not sharing_allowed(None, {"GRADSYNC_SHARE_GPUS": "0"})


def no_gpu() -> None:
    raise AssertionError("no rank is started")


@pytest.mark.skipif(torch.cuda.is_available(), reason="This machine has a GPU.")
def test_ranks_over_nccl_need_a_gpu() -> None:
    with pytest.raises(LaunchError, match="ranks over NCCL need a GPU, and torch sees none here: leave nccl out"):
        gs.spawn(no_gpu, 2, nccl=True)


def test_ranks_take_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for name in ("NCCL_HOSTID", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    take_gpu(1, 3)
    assert "NCCL_HOSTID" not in os.environ
    take_gpu(2, 3)
    assert taken == [1, 0]
    assert os.environ["NCCL_HOSTID"] == "gradsync-rank-2"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
    take_gpu(0, 1)  # in a smaller run of the same process
    assert "NCCL_HOSTID" not in os.environ


def environment_of(name: str) -> str | None:
    return os.environ.get(name)


def test_a_pool_adds_to_the_environment(warm: ForkServerContext) -> None:
    with RankPool(1, context=warm, env={"GRADSYNC_TEST": "here"}) as pool:
        assert pool.run(environment_of, "GRADSYNC_TEST") == ["here"]


def test_a_lab_tells_every_rank_its_host_id() -> None:
    from netlab.placement import environment, rank_places

    told: Callable[..., dict[str, str]] = environment
    first, _, third = (told(place, 3, 2, 1, {}, share_gpus=True) for place in rank_places(2, [2, 1]))
    assert (first["NCCL_HOSTID"], third["NCCL_HOSTID"]) == ("gradsync-rank-0", "gradsync-rank-2")
    assert (first["NCCL_SOCKET_IFNAME"], first["GRADSYNC_SHARE_GPUS"]) == ("=eth0", "1")
    assert "NCCL_HOSTID" not in told(rank_places(2, 1)[0], 2, 2, 1, {})
