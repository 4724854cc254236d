"""Part 3: the same costs on a GPU, where a trace is made of events. One rank over NCCL, with the hooks forced on.

python benchmarks/signals/gpu.py --out results.json

With one rank nothing is compared, so digests are measured by themselves: those of one step, on the device.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import bench_harness  # noqa: E402
from gradsync.drift.digests import ReplicaDigests  # noqa: E402
from gradsync.engine.attach import attach_engine  # noqa: E402
from gradsync.plan.guard import Guard  # noqa: E402
from signals.cost import BARE, STEPS, TRACED, cost  # noqa: E402
from slow_link import store  # noqa: E402

_ROUNDS, _WARM_UP_TURNS = 30, 8
SHAPES = {"85 M": (12, 768, 8), "340 M": (12, 1536, 16)}  # parameters: layers, width, sequences of 512


class Variant:
    """One way to train a transformer."""

    def __init__(self, name: str, layers: int, width: int, batch: int, folder: str) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True)
        self.model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).cuda().to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        trace = Path(folder, name) if name == TRACED else None
        guard = Guard(drift="off")
        self.sync = attach_engine(
            self.model, self.optimizer, None, None, "broadcast", (), guard, always=True, trace=trace
        )
        self.x = torch.randn(batch, 512, width, device="cuda", dtype=torch.bfloat16)

    def turn(self) -> float:
        """Seconds per step of one turn."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            self.model(self.x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / STEPS

    def digests_s(self) -> float:
        """Seconds that the device takes for the digests of one step: the median of many."""
        replica_digest = ReplicaDigests(self.sync._synchronization.entries, [self.optimizer], None)
        taken = []
        for step in range(70):
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            replica_digest.take(step)
            last.record()
            replica_digest.announce()
            torch.cuda.synchronize()
            taken.append(first.elapsed_time(last) / 1e3)
        return sorted(taken[5:])[len(taken[5:]) // 2]


def cell(workload: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="gradsync-signals-") as folder:
        arms = {name: Variant(name, *SHAPES[workload], folder) for name in (BARE, TRACED)}
        for _ in range(_WARM_UP_TURNS):
            for arm in arms.values():
                arm.turn()
        samples = bench_harness.interleave({name: arm.turn for name, arm in arms.items()}, _ROUNDS)
        digests_s = arms[BARE].digests_s()
        for arm in arms.values():
            arm.sync.detach()
    return {
        "parameters": sum(parameter.numel() for parameter in arms[BARE].model.parameters()),
        "rounds": _ROUNDS,
        "costs": {f"{TRACED} / {BARE}": cost(samples, TRACED, BARE)},
        "digests_s": digests_s,
        "samples_s": bench_harness.rounded(samples),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    parser.add_argument("--commit", default=bench_harness.commit(HERE))
    options = parser.parse_args()
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    for workload in SHAPES:
        found = cell(workload)
        facts = {"machine": bench_harness.machine(), "commit": options.commit}
        store.keep(options.out, "gpu", workload, facts | found)
        print(workload, found["costs"], f"digests {1e3 * found['digests_s']:.3f} ms", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
