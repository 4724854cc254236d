"""A rank that is gone is named, in shared memory, in gloo and in DDP's backward; a rank elsewhere goes by gloo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sides import begin_again, gradsync_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs
from gradsync.launch.spawn import RankPool
from gradsync.torch_backend.group import GradsyncGroup
from gradsync.transport.host_meeting import declare_host

Run = Callable[..., list[Any]]
COUNTED = ("all_reduce", "all_gather", "broadcast", "forward")


def summing(group: Any) -> None:
    for _ in range(100):
        dist.all_reduce(torch.ones(10), group=group)


def summing_asynchronously(group: Any) -> None:
    for _ in range(100):
        dist.all_reduce(torch.ones(100_000), group=group, async_op=True).wait()


def gathering(group: Any) -> None:
    for _ in range(100):
        dist.all_gather([torch.empty(10), torch.empty(10)], torch.ones(10), group=group)


def broadcasting(group: Any) -> None:
    for _ in range(100):
        dist.broadcast(torch.ones(10), 1, group=group)


def training(group: Any) -> None:
    ddp = DistributedDataParallel(nn.Linear(8, 8), process_group=group)
    for _ in range(100):
        ddp(torch.randn(4, 8)).sum().backward()


def killed_in(doing: Callable[[Any], None], elsewhere: bool) -> str:
    if elsewhere:
        declare_host(f"host-{dist.get_rank()}")
    group = gradsync_group()
    if dist.get_rank() == 1:
        doing_calls = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal doing_calls
            doing_calls += event == "call" and frame.f_code.co_name in (
                "all_reduce",
                "all_gather",
                "broadcast",
                "forward",
            )
            if doing_calls == 8:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)
    with pytest.raises(gs.PeerLost) as caught:
        doing(group)
    assert caught.value.ranks == (1,)
    return str(caught.value)


@pytest.mark.parametrize(
    ("doing", "elsewhere"),
    [
        *((summing, False), (summing_asynchronously, False), (gathering, False), (training, False)),
        *((broadcasting, False), (gathering, True)),
    ],
)
def test_a_killed_rank_is_named(doing: Callable[[Any], None], elsewhere: bool, pool: RankPool) -> None:
    survivor, killed = pool.outcomes(killed_in, doing, elsewhere, ranks=2)
    assert survivor.ok, survivor.text
    assert "rank 1" in survivor.value
    assert "SIGKILL" in killed.text


def on_two_hosts() -> None:
    rank = dist.get_rank()
    declare_host("a" if rank < 2 else "b")
    group = gradsync_group()
    assert isinstance(group, GradsyncGroup)
    assert group._queue is None  # memory is shared by some only
    tensor = torch.full((1000,), 1.0 + rank)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [6.0] * 1000
    inside = [dist.new_group(ranks, backend="gradsync") for ranks in ([0, 1], [2])][rank // 2]
    dist.all_reduce(tensor, group=inside)
    assert tensor[0].item() == (12 if rank < 2 else 6)
    declare_host(None)


def test_a_group_across_hosts_sums_by_gloo_and_inside_a_host_in_memory(run: Run) -> None:
    run(on_two_hosts, ranks=3)


def refusals_and_new_beginnings(folder: Path) -> None:
    with pytest.raises(ValueError, match="takes pg_options for nccl only"):
        dist.new_group(backend="gradsync", pg_options=object())
    threads = set(os.listdir("/proc/self/task"))
    for number in range(3):
        (folder / str(number)).mkdir(exist_ok=True)
        begin_again(folder / str(number), "gradsync")
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        work = dist.all_reduce(tensor, async_op=True)
        work.get_future().wait()
        assert tensor.tolist() == [4, 4, 4]
    dist.destroy_process_group()
    left = set(os.listdir("/proc/self/task")) - threads
    assert len(left) <= 2, left  # gloo's own may take a moment


def test_a_group_can_be_destroyed_and_made_again(run: Run, tmp_path: Path) -> None:
    run(refusals_and_new_beginnings, tmp_path)


def test_gradsync_alone_registers_nothing() -> None:
    code = "import torch.distributed as d, gradsync; assert 'gradsync' not in d.Backend.backend_list"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
