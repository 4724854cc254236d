"""Deaths on NCCL: survivors raise the named error within the bound; they exit, or attach again in the same process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs

Run = Callable[..., list[Any]]
STEP = 5
PHASES = ["in forward", "in backward", "before the step", "after it"]


class Doom:
    """Ends this rank, at a place in a step."""

    def __init__(self, phase: str, how: str) -> None:
        self.phase, self.how = phase, how

    def strikes(self, phase: str, step: int) -> None:
        if (phase, step) != (self.phase, STEP):
            return
        if self.how == "raised":
            raise ValueError("the rank's own")
        os.kill(os.getpid(), signal.SIGKILL if self.how == "killed" else signal.SIGSTOP)


def train(phase: str, how: str, victim: int, guard: gs.Guard) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sync = gs.attach(model, optimizer, gs.Plan(bucket_bytes=1 << 20), guard=guard)
    doom = Doom(phase if dist.get_rank() == victim else "never", how)
    steps = iter(range(10**6))
    step = 0
    list(model.parameters())[2].register_hook(lambda _: doom.strikes("in backward", step))
    for step in steps:
        x = torch.randn(64, 512, device="cuda")
        out = model(x)
        doom.strikes("in forward", step)
        out.square().mean().backward()
        doom.strikes("before the step", step)
        optimizer.step()
        optimizer.zero_grad()
        doom.strikes("after it", step)
        out.sum().item()  # the host waits for the GPU, where nobody can raise
    sync.detach()


def main() -> None:
    """One rank of a job whose processes are watched until they have ended."""
    phase, how, victim = sys.argv[1], sys.argv[2], int(sys.argv[3])
    gs.init(share_gpus=True)
    try:
        train(phase, how, victim, gs.Guard(timeout=20, dead_after=3))
    except Exception as error:
        print(f"{time.time()} {type(error).__name__}: {error}", flush=True)
        raise SystemExit(1) from None


def job(folder: Path, ranks: int, *arguments: str) -> dict[int, tuple[str, float, float]]:
    """Each survivor's last line, when it printed it, and how long after that its process was gone."""
    victim = int(arguments[2])
    env = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(ranks), "MASTER_PORT": str(20_000 + os.getpid() % 20_000),
        "LOCAL_WORLD_SIZE": str(ranks),
    }  # fmt: skip
    started, files = {}, {}
    for rank in range(ranks):
        files[rank] = (folder / f"{rank}.txt").open("w+")
        started[rank] = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=files[rank], stderr=subprocess.STDOUT,
        )  # fmt: skip
    found = {}
    try:
        ended: dict[int, float] = {}
        end = time.monotonic() + 70
        while len(ended) < ranks - 1 and time.monotonic() < end:
            for rank, process in started.items():
                if rank != victim and rank not in ended and process.poll() is not None:
                    ended[rank] = time.time()
            time.sleep(0.01)
        for rank in started.keys() - {victim}:
            text = (folder / f"{rank}.txt").read_text()
            assert rank in ended, f"rank {rank} did not end: {text[-2000:]}"
            said = [line for line in text.splitlines() if re.match(r"\d+\.\d+ \w+: ", line)]
            assert len(said) == 1, text[-3000:]
            at, told = said[0].split(" ", 1)
            found[rank] = (told, float(at), ended[rank] - float(at))
    finally:
        for process in started.values():
            process.kill()
            process.wait()
        for file in files.values():
            file.close()
    return found


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("phase", "how", "victim", "ranks"),
    [
        ("in forward", "killed", 1, 2),
        ("in backward", "killed", 0, 3),
        ("before the step", "killed", 2, 3),
        ("after it", "killed", 1, 4),
        ("in backward", "raised", 1, 3),
        ("before the step", "stopped", 1, 3),
    ],
)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="There is no GPU on this machine.")
def test_every_survivor_names_the_rank_and_its_process_ends(
    tmp_path: Path, phase: str, how: str, victim: int, ranks: int
) -> None:
    became = {"killed": "died", "raised": "(left|ended)", "stopped": "gives no sign of life"}[how]
    for told, _, left_s in job(tmp_path, ranks, phase, how, str(victim)).values():
        assert re.match(rf"PeerLost: \[rank \d/\d step \d+( bucket \d)?\] rank {victim} \(pid \d+\) {became}", told)
        assert left_s < 2.5, f"the process was there {left_s:.1f} s after {told}"


def survive(victim: int) -> list[Any]:
    """Lose a rank, attach again with the others in the same process, and train on."""
    rank = dist.get_rank()
    try:
        train("in backward", "killed", victim, gs.Guard(timeout=20))
    except gs.PeerLost as error:
        lost = error.ranks
    others = [each for each in range(dist.get_world_size()) if each != victim]
    group = dist.new_group(others, use_local_synchronization=True)
    torch.manual_seed(rank)
    model = nn.Linear(64, 64).cuda()
    sync = gs.attach(model, group=group)
    model(torch.full((4, 64), float(rank), device="cuda")).sum().backward()
    assert model.weight.grad is not None
    found = model.weight.grad.unique().tolist()
    sync.detach()
    return [list(lost), found]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("victim", [1, 2])
def test_the_remaining_ranks_attach_again_in_the_same_process(nccl_alone: Run, victim: int) -> None:
    outcomes = nccl_alone(survive, victim, ranks=3, timeout=100)
    left = [each for each in range(3) if each != victim]
    for rank in left:
        assert outcomes[rank].ok, outcomes[rank].text
        assert outcomes[rank].value == [[victim], [4 * sum(left) / 2]]


if __name__ == "__main__":
    main()
