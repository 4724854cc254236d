"""On a GPU: flipped bits are found, named and repaired, and a step waits for no digest."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drift_cases import Flip, Told, train
from torch import nn

import gradsync as gs
from gradsync.agreement.header import DIGEST_COMES_LATER, Head, Headers, pack_header
from gradsync.drift.digests import ReplicaDigests
from gradsync.engine.bucket import GradEntry
from silent_device import host_never_waits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="There is no GPU on this machine.")


class OnDevice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(40, 30, device="cuda"))
        self.small = nn.Parameter(torch.randn(9, device="cuda", dtype=torch.float64))
        self.large = nn.Parameter(torch.randn(1 << 19, device="cuda"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(param.float() * x.cuda().sum()).sum() for param in self.parameters()]).sum()


def flip_on_device(flip: Flip | None) -> Told:
    return train(flip, 5, 1, 72, gs.Guard(drift="repair"), model=OnDevice())


@pytest.mark.parametrize(
    "flip",
    [Flip("weight", "", 77, 30), Flip("large", "exp_avg_sq", 123456, 29), Flip("weight", "step", 0, 23)],
    ids=str,
)
def test_a_flip_on_a_device_is_found_and_repaired(flip: Flip, run: Any) -> None:
    told, clean = run(flip_on_device, flip, ranks=3, timeout=180), run(flip_on_device, None, ranks=3, timeout=180)
    assert {each.digest for each in told} == {clean[0].digest}
    for each in told:
        assert each.whats == ["drift", "repair"]
        assert each.lines[0][2:4] == ([1], flip.parameter)
    assert all(each.lines == [] for each in clean)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_digests_and_the_loss_scale_are_asked_for_without_waiting() -> None:
    model = OnDevice()
    opt = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    scaler.scale(model(torch.randn(3))).backward()
    scaler.step(opt)
    entries = [GradEntry(i, name, p, {}, name, False) for i, (name, p) in enumerate(model.named_parameters())]
    replica_digest = ReplicaDigests(entries, [opt], scaler)
    said = []
    for step in range(64):
        with host_never_waits() if step > 2 else nullcontext():
            replica_digest.take(step)
        torch.cuda.synchronize()
        with host_never_waits() if step > 2 else nullcontext():
            said.append(replica_digest.announce())
    assert said[0] == (bytes(8), 0.0)
    assert all(int.from_bytes(word, "little") > 1 and scale == 1024.0 for word, scale in said[1:])
    assert said[1] == said[61]


def test_a_digest_that_the_gpu_still_computes_is_said_in_a_later_header() -> None:
    model = OnDevice()
    opt = torch.optim.AdamW(model.parameters())
    model(torch.randn(3)).backward()
    opt.step()
    entries = [GradEntry(i, name, p, {}, name, False) for i, (name, p) in enumerate(model.named_parameters())]
    replica_digest = ReplicaDigests(entries, [opt], None)

    def exchange() -> bytes:
        """One header of a group of one."""
        word, scale = replica_digest.announce()
        head = Head(0, 0, 1.0, 1, -1, 1, 0, bytes(8), replica_digest=word, loss_scale=scale)
        replica_digest.hear(Headers(pack_header(head, b"")[None]))
        return word

    for number in (6, 2):  # at first kernels are loaded, and memory is pinned
        replica_digest.forget()
        for step in range(number):
            replica_digest.take(step)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    with host_never_waits():
        replica_digest.take(2)
        replica_digest.take(3)
        early = [exchange() for _ in range(4)]
    torch.cuda.synchronize()
    replica_digest.take(4)
    late = [exchange() for _ in range(2)]
    assert early[2:] == [DIGEST_COMES_LATER] * 2
    assert all(int.from_bytes(word, "little") > 1 for word in (*early[:2], *late))


def scales_on_device() -> list[str]:
    model = OnDevice()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0 if dist.get_rank() != 1 else 512.0)
    sync = gs.attach(model, opt, guard=gs.Guard(drift="raise"), scaler=scaler)
    try:
        for _ in range(5):
            scaler.scale(model(torch.randn(3))).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    except gs.Disagreement as error:
        return [str(error)]
    finally:
        sync.detach()
    return []


def test_a_loss_scale_on_a_device_is_compared_too(run: Any) -> None:
    for said in run(scales_on_device, ranks=3, timeout=120):
        assert said[0].startswith("the loss scale is 1024 on ranks 0 and 2 but 512 on rank 1")
