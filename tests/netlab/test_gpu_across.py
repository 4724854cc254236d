"""Hosts of a lab that share a GPU: NCCL's bytes cross the link between them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import gradsync as gs
from netlab.fixture import MakeLab
from netlab.lab import payload

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="There is no GPU on this machine.")

NUMEL = 1 << 20


def add_up(numel: int) -> tuple[str, float]:
    gs.init(timeout=60)
    ones = torch.ones(numel, device="cuda")
    dist.all_reduce(ones)
    found = ones.unique().item()
    world = dist.group.WORLD
    assert world is not None
    name = world._get_backend(torch.device("cuda")).name()
    dist.destroy_process_group()
    return name, found


def test_nccl_goes_over_the_link(lab: MakeLab) -> None:
    with lab(hosts=2, rate="1gbit") as hosts:
        assert hosts.spawn(add_up, 1, NUMEL, share_gpus=True, timeout=110) == [["nccl", 2.0]] * 2
        for sent in hosts.counters():
            assert payload(sent.nbytes, sent.packets) >= 4 * NUMEL
