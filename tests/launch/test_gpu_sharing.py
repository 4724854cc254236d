"""Several ranks over NCCL on one GPU, or on as many as there are."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launchers import without_launcher
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs
from gradsync.errors import LaunchError
from gradsync.launch.shared_gpus import NOTE, Mps, check_nccl_ranks
from gradsync.launch.spawn import RankPool
from models import mlp
from nccl_ranks import met
from yardstick import assert_replicas_equal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="There is no GPU on this machine.")

Run = Callable[..., list[Any]]

STEPS = 10


def train(kind: str) -> list[torch.Tensor]:
    """The weights after a few steps of the same model on other data on each rank."""
    torch.manual_seed(1)
    model = mlp().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sync = gs.attach(model, optimizer, gs.Plan(bucket_bytes=2048)) if kind == "gs" else None
    forward = DistributedDataParallel(model) if kind == "ddp" else model
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        forward(torch.randn(16, 8, generator=generator).cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if sync is not None:
        assert sync.stats()["steps"] == STEPS
        sync.detach()
    return [param.detach().clone() for param in model.parameters()]


def like_ddp(exact: bool) -> str | None:
    world = dist.group.WORLD
    assert world is not None
    assert world._get_backend(torch.device("cuda")).name() == "nccl"
    assert met() == dist.get_world_size()
    ours, theirs = train("gs"), train("ddp")
    for a, b in zip(ours, theirs, strict=True):
        if exact:
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert_replicas_equal({str(i): param for i, param in enumerate(ours)})
    return os.environ.get("NCCL_HOSTID")


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_train_like_ddp(ranks: int, nccl: Run) -> None:
    hosts = nccl(like_ddp, ranks == 2, ranks=ranks, timeout=120)
    sharing = ranks > torch.cuda.device_count()
    assert (hosts[0] == "gradsync-rank-0") is sharing
    assert len(set(hosts)) == ranks or not sharing


def die_or_wait() -> int:
    count = met()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return count


def test_a_rank_may_be_killed_without_harm_to_others(nccl: Run, nccl_alone: Run) -> None:
    assert nccl(met) == [2, 2]
    survivor, killed = nccl_alone(die_or_wait)
    assert "killed by SIGKILL" in killed.text
    assert survivor.value == 2 or not survivor.ok
    assert nccl(met, ranks=4) == [4] * 4


def test_spawn_gives_every_rank_a_gpu() -> None:
    assert gs.spawn(met, 2, nccl=True, timeout=120) == [2, 2]


def test_mps_serves_ranks_and_is_gone() -> None:
    if shutil.which("nvidia-cuda-mps-control") is None:
        pytest.skip("There is no nvidia-cuda-mps-control on this machine.")
    with Mps() as mps, RankPool(2, threads=1, nccl=True, env=mps.environment) as pool:
        assert pool.run(met, timeout=120) == [2, 2]
        folder = Path(mps.environment["CUDA_MPS_PIPE_DIRECTORY"])
        pid = int((folder / "nvidia-cuda-mps-control.pid").read_text())
        assert Path(f"/proc/{pid}").exists()
    assert not folder.exists()
    status = Path(f"/proc/{pid}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()


SCRIPT = """
import os, sys, torch, torch.distributed as dist
import gradsync as gs
try:
    gs.init(timeout=60, share_gpus={"on": True, "off": False, "env": None}[sys.argv[1]])
except gs.LaunchError as error:
    os.write(1, f"{error}\\n".encode())
    sys.exit(3)
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sync = gs.attach(model, optimizer)
for step in range(10):
    model(torch.full((4, 8), 1.0 + dist.get_rank(), device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
sync.detach()
theirs = model.weight.detach().clone()
dist.broadcast(theirs, 0)
assert torch.equal(theirs, model.weight)
torch.cuda.synchronize()
name = dist.group.WORLD._get_backend(torch.device("cuda")).name()
os.write(1, f"{name}\\n".encode())  # at once, or the ranks' lines mix
dist.destroy_process_group()
"""


def torchrun(folder: Path, switch: str, **env: str) -> tuple[int, str, str]:
    """One rank more than there are GPUs."""
    script, ranks = folder / "train.py", torch.cuda.device_count() + 1
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    clean = {name: value for name, value in without_launcher(os.environ).items() if not name.startswith("NCCL_")}
    done = subprocess.run(
        [*command, str(script), switch],
        env=clean | {"OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("switch", "env"), [("on", {}), ("env", {"GRADSYNC_SHARE_GPUS": "1"})])
def test_torchrun_may_start_more_ranks_than_gpus(switch: str, env: dict[str, str], tmp_path: Path) -> None:
    code, out, err = torchrun(tmp_path, switch, **env)
    assert code == 0, err
    assert out.split() == ["nccl"] * (torch.cuda.device_count() + 1)
    assert err.count(NOTE) == 1


def test_without_the_switch_gloo_serves_them(tmp_path: Path) -> None:
    code, out, err = torchrun(tmp_path, "off", GRADSYNC_SHARE_GPUS="1")
    assert code == 0, err
    assert out.split() == ["gloo"] * (torch.cuda.device_count() + 1)
    assert err.count("share a GPU, which NCCL cannot by itself, so gloo serves") == 1


def test_a_host_id_that_all_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = torchrun(tmp_path, "on", NCCL_HOSTID="mine")
    assert code != 0
    assert "share GPUs and both have NCCL_HOSTID=mine, so NCCL would take them for one host" in out
    monkeypatch.setenv("NCCL_HOSTID", "mine")
    with pytest.raises(LaunchError, match="both have NCCL_HOSTID=mine"):
        check_nccl_ranks(torch.cuda.device_count() + 1)
