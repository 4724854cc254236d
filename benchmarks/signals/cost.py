"""Part 1: what trace, header and digests cost. All arms take turns in the same two processes.

    gradsync                  attach(guard=Guard(drift="off"))              what the others are compared with
    gradsync + trace          the same, trace=folder
    gradsync + trace, digests the same, Guard(drift="warn"): the header compares replicas
    gradsync + everything     the same, nonfinite="skip": every gradient is looked through for NaN before it travels
    DDP                       stock
    DDP + observe             gs.observe(ddp, trace=folder), which compares replicas too

A turn is ten steps, since one step in ten is traced in detail; the first steps, which all are, are warm-up.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bench_harness
import gradsync as gs
from signals.models import WORKLOADS

STEPS = 10
_WARM_UP_TURNS = 6
BARE, TRACED, WATCHED, ALL, DDP, OBSERVED = (
    "gradsync",
    "gradsync + trace",
    "gradsync + trace, digests",
    "gradsync + everything",
    "DDP",
    "DDP + observe",
)
PAIRS = ((TRACED, BARE), (WATCHED, BARE), (ALL, BARE), (OBSERVED, DDP), (BARE, DDP))  # what is compared with what

_OFF = gs.Guard(drift="off")
_GUARDS = {WATCHED: gs.Guard(drift="warn"), ALL: gs.Guard(drift="warn", nonfinite="skip")}

Close = Callable[[], None]
Opened = tuple[nn.Module, Close]


def _opened(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> Opened:
    """What is called for a forward, and how to leave."""
    if name in (DDP, OBSERVED):
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return ddp, gs.observe(ddp, trace=folder).close if name == OBSERVED else lambda: None
    trace = None if name == BARE else folder
    return model, gs.attach(model, optimizer, guard=_GUARDS.get(name, _OFF), trace=trace).detach


class Variant:
    """One way to train one replica."""

    def __init__(self, name: str, workload: str, samples: int, folder: str) -> None:
        torch.manual_seed(0)
        made = WORKLOADS[workload]
        model = made.build()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.forward, self.close = _opened(name, model, self.optimizer, str(Path(folder, name)))
        self.x = torch.randn(samples, made.width, generator=torch.Generator().manual_seed(dist.get_rank()))

    def turn(self) -> float:
        """Seconds per step of one turn; every rank starts it together."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(STEPS):
            self.forward(self.x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return (time.perf_counter() - start) / STEPS


def calibrate(workload: str) -> int:
    """How many samples make a step without trace, digests and checks as long as it is to be."""
    samples, wanted = WORKLOADS[workload].samples, WORKLOADS[workload].step_s
    for _ in range(3):
        step_s = gs.spawn(_bare_step, 2, workload, samples, timeout=300)[0]
        samples = max(8, round(samples * wanted / step_s))
    return samples


def _bare_step(workload: str, samples: int) -> float:
    arm = Variant(BARE, workload, samples, "")
    taken = [arm.turn() for _ in range(12)]
    arm.close()
    return median(taken[2:])


def measure(workload: str, samples: int, rounds: int, folder: str) -> dict[str, list[float]]:
    """One launch, on every rank."""
    arms = {name: Variant(name, workload, samples, folder) for name in (BARE, TRACED, WATCHED, ALL, DDP, OBSERVED)}
    for _ in range(_WARM_UP_TURNS):
        for arm in arms.values():
            arm.turn()
    samples = bench_harness.interleave({name: arm.turn for name, arm in arms.items()}, rounds)
    for arm in arms.values():
        arm.close()
    return bench_harness.rounded(samples)


def cell(workload: str, rounds: int, launches: int) -> dict[str, Any]:
    """A model, in fresh processes each time: where memory lies differs from process to process."""
    taken_s: dict[str, list[float]] = {}
    nbytes, samples = 0, calibrate(workload)
    for _ in range(launches):
        with tempfile.TemporaryDirectory(prefix="gradsync-signals-") as folder:
            first, _ = gs.spawn(measure, 2, workload, samples, rounds, folder, timeout=600)
            nbytes = Path(folder, TRACED, "rank-0.jsonl").stat().st_size
        for name, taken in first.items():
            taken_s.setdefault(name, []).extend(taken)
    steps = STEPS * (_WARM_UP_TURNS + rounds)
    model = WORKLOADS[workload].build()
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "rounds": rounds,
        "launches": launches,
        "trace_nbytes_per_step": round(nbytes / steps),
        "samples_per_batch": samples,
        "costs": {f"{arm} / {base}": cost(taken_s, arm, base) for arm, base in PAIRS},
        "samples_s": taken_s,
    }


def cost(samples: dict[str, list[float]], arm: str, base: str) -> dict[str, float]:
    """The median of the differences within a round, where the middle half lies, and how sure the median is.

    >>> found = cost({"a": [1.1, 1.3, 1.2], "b": [1.0, 1.0, 1.0]}, "a", "b")
    >>> round(found["share"], 3), round(found["difference_s"], 3)
    (0.2, 0.2)
    """
    pairs = list(zip(samples[arm], samples[base], strict=True))
    shares = sorted(a / b - 1 for a, b in pairs)
    low, _, high = quantiles(shares, n=4)
    margin = round(0.98 * len(shares) ** 0.5)  # the median's 95 % by the sign test: ranks n/2 ± 1.96 √n/2
    middle = (len(shares) - 1) // 2
    return {
        "difference_s": median(a - b for a, b in pairs),
        "share": median(shares),
        "share_low": low,
        "share_high": high,
        "median_low": shares[max(0, middle - margin)],
        "median_high": shares[min(len(shares) - 1, middle + 1 + margin)],
    }
