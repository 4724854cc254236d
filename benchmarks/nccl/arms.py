"""The ways to train that are compared, and one replica trained in one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs
from nccl.crew import Crew
from nccl.models import Workload

NO_SYNC, DDP, DDP_BF16 = "no sync", "DDP", "DDP, bf16 hook"
EXACT, BF16, INT8, INT4 = "gradsync exact", "gradsync bf16", "gradsync int8", "gradsync int4"
POWERSGD, SIGN, TOPK = "gradsync PowerSGD 4", "gradsync sign", "gradsync topk 1 %"
PLANS: dict[str, Callable[[], gs.Plan]] = {
    EXACT: gs.Plan,
    BF16: lambda: gs.Plan(compress=gs.bf16()),
    INT8: lambda: gs.Plan(compress=gs.int8()),
    INT4: lambda: gs.Plan(compress=gs.int4()),
    POWERSGD: lambda: gs.Plan(compress=gs.powersgd(4)),
    SIGN: lambda: gs.Plan(compress=gs.sign()),
    TOPK: lambda: gs.Plan(compress=gs.topk(0.01)),
}
BUCKETS_MB = (None, 25, 50, 100, 200)
"""DDP's; None is its default: 25, after a first one of 1."""
_LEARNING_RATE = 1e-6  # what is learned does not matter, and nothing must become infinite


class Arm(NamedTuple):
    """A way to train: `name` says which plan, and what of the model is compiled."""

    name: str
    bucket_mb: int | None = None
    compiled: str = ""  # "", "whole" or "blocks"

    @property
    def label(self) -> str:
        return f"{self.name}, {self.compiled} compiled" if self.compiled else self.name


class Replica:
    """Parameters and an optimizer, trained in the way of an arm.

    `twin`: a replica whose parameters and optimizer state it shares, so that many arms fit into memory. That is
    right for all that keep replicas equal, so not for the one without synchronization.
    """

    def __init__(self, crew: Crew, workload: Workload, arm: Arm, twin: Replica | None = None) -> None:
        torch.manual_seed(0)
        with crew.device:
            self.model = workload.build()
        parameters = list(self.model.parameters())
        if twin is not None:
            for own, shared in zip(parameters, twin.model.parameters(), strict=True):
                own.data = shared.data
        self.optimizer = torch.optim.AdamW(parameters, lr=_LEARNING_RATE, weight_decay=0.0, fused=True)
        if twin is not None:
            for own, shared in zip(parameters, twin.model.parameters(), strict=True):
                self.optimizer.state[own] = twin.optimizer.state[shared]
        self._autocast = torch.autocast(crew.device.type, torch.bfloat16, enabled=workload.autocast)
        self._batch = workload.draw(torch.Generator().manual_seed(crew.rank)).to(crew.device)
        self._crew, self._arm = crew, arm
        self.sync: gs.GradSync | None = None
        self.forward: Any = self.model

    def prime(self) -> None:
        """Make the optimizer's state, without a change of the parameters."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def begin(self) -> None:
        """Wrap or attach the model; all ranks do so at once."""
        arm, dry = self._arm, self._crew.dry
        compiler = "aot_eager" if dry else "inductor"
        if arm.compiled == "blocks":
            for block in self.model.blocks:  # type: ignore[union-attr]
                block.compile(backend=compiler)
        if arm.name in (DDP, DDP_BF16):
            self.forward = _ddp(self.model, arm, dry)
        elif arm.name != NO_SYNC:
            self.sync = gs.attach(self.model, self.optimizer, PLANS[arm.name]())
        if arm.compiled == "whole":
            self.forward = torch.compile(self.forward, backend=compiler)

    def step(self) -> None:
        with self._autocast:
            loss = self.forward(self._batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def end(self) -> None:
        """Unwrap or detach; nothing may be under way."""
        if self.sync is not None:
            self.sync.detach()
            self.sync = None
        self.forward = self.model


def _ddp(model: nn.Module, arm: Arm, dry: bool) -> nn.Module:
    ddp = DistributedDataParallel(model, bucket_cap_mb=arm.bucket_mb, gradient_as_bucket_view=True)
    if arm.name == DDP_BF16:
        ddp.register_comm_hook(None, fp16_compress_hook if dry else bf16_compress_hook)  # bf16 is for NCCL only
    return ddp
