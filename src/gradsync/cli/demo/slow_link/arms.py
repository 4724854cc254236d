"""The ways to train that are compared over a slow link."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradsync.cli.demo.story.arms import ALONE, DDP, GRADSYNC
from gradsync.compress.integers import int4, int8
from gradsync.compress.powersgd import powersgd
from gradsync.compress.recipe import Compressor
from gradsync.compress.topk import topk
from gradsync.engine.attach import attach
from gradsync.plan.sync_plan import Plan

End = Callable[[], None]
Way = Callable[[nn.Module, Optimizer], tuple[nn.Module, End]]
"""From a model and its optimizer to what is called in the model's place, and to what ends it."""


def _alone(plain: nn.Module, _: Optimizer) -> tuple[nn.Module, End]:
    return plain, lambda: None


def _ddp(plain: nn.Module, _: Optimizer, half: bool = False) -> tuple[nn.Module, End]:
    model = DistributedDataParallel(plain, gradient_as_bucket_view=True)
    if half:
        model.register_comm_hook(None, fp16_compress_hook)
    return model, lambda: None


def _ours(plain: nn.Module, optimizer: Optimizer, compress: Compressor | None = None) -> tuple[nn.Module, End]:
    return plain, attach(plain, optimizer, Plan(compress=compress)).detach


COMPRESSED: dict[str, Compressor] = {
    "gradsync int8()": int8(),
    "gradsync int4()": int4(),
    "gradsync topk(0.01)": topk(0.01),
    "gradsync powersgd(4)": powersgd(4),
}
ARMS: dict[str, Way] = {
    ALONE: _alone,
    DDP: _ddp,
    "DDP, fp16 hook": partial(_ddp, half=True),
    GRADSYNC: _ours,
    **{name: partial(_ours, compress=compress) for name, compress in COMPRESSED.items()},
}
