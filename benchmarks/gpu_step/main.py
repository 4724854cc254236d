"""Two ranks on one GPU over gloo, a GPT of 124 M parameters in bf16: what does a step cost with each compressor?

python benchmarks/gpu_step/main.py            # on a machine with a GPU
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import bench_harness  # noqa: E402
import gradsync as gs  # noqa: E402

WIDTH, DEPTH, HEADS, CONTEXT, VOCABULARY = 768, 12, 12, 1024, 50304
COMPRESSORS: dict[str, Callable[[], Any]] = {
    "int8": gs.int8,
    "int4": gs.int4,
    "sign": gs.sign,
    "topk 1 %": lambda: gs.topk(0.01),
    "randomk 1 %": lambda: gs.randomk(0.01),
    "powersgd 4": lambda: gs.powersgd(4),
}
Wrap = Callable[[nn.Module, torch.optim.Optimizer], nn.Module]


class Block(nn.Module):
    """Attention and a multilayer perceptron, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.queries = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.queries(self.norms[0](x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """The small GPT-2, its embedding shared with its head: 124 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        logits = self.norm(self.blocks(x)) @ self.tokens.weight.T
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Variant:
    """One replica, trained in one way."""

    def __init__(self, wrap: Wrap, batch: int) -> None:
        torch.manual_seed(0)
        model = GPT().to("cuda", torch.bfloat16)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.forward = wrap(model, self.optimizer)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.ids = torch.randint(VOCABULARY, (batch, CONTEXT), generator=generator).cuda()

    def turn(self) -> float:
        """Seconds of one step; every rank starts it together."""
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        self.forward(self.ids).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.cuda.synchronize()
        return time.perf_counter() - start


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    return model


def _ddp(model: nn.Module, optimizer: torch.optim.Optimizer, half: bool) -> nn.Module:
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if half:
        ddp.register_comm_hook(None, fp16_compress_hook)
    return ddp


def _ours(
    model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Callable[[], Any] | None, syncs: list[gs.GradSync]
) -> nn.Module:
    syncs.append(gs.attach(model, optimizer, gs.Plan(compress=recipe() if recipe else None)))
    return model


def measure(rounds: int, batch: int) -> dict[str, Any]:
    """All arms, taking turns; on rank 0, what each took, and what ours say of themselves."""
    torch.cuda.set_device(0)
    syncs: dict[str, list[gs.GradSync]] = {}
    wraps: dict[str, Wrap] = {
        "no sync": _plain,
        "DDP": partial(_ddp, half=False),
        "DDP, fp16": partial(_ddp, half=True),
    }
    for name, recipe in {"exact": None, **COMPRESSORS}.items():
        wraps[f"gradsync, {name}"] = partial(_ours, recipe=recipe, syncs=syncs.setdefault(f"gradsync, {name}", []))
    arms = {name: Variant(wrap, batch) for name, wrap in wraps.items()}
    for arm in arms.values():
        for _ in range(4):
            arm.turn()
    samples = bench_harness.interleave({name: arm.turn for name, arm in arms.items()}, rounds)
    stats = {name: sync[0].stats() for name, sync in syncs.items()}
    for sync in syncs.values():
        sync[0].detach()
    return {
        "samples": bench_harness.rounded(samples),
        "stats": stats,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def table(launch: dict[str, Any]) -> str:
    """One launch, for people."""
    samples, rows = launch["samples"], []
    for name, values in samples.items():
        faster = 1 / bench_harness.paired_ratio(samples, name, "DDP")[0]
        payload = launch["stats"].get(name, {}).get("nbytes", 0) / 1e6
        rows.append([name, bench_harness.milliseconds(values), f"{faster:.2f}", f"{payload:.1f}" if payload else "–"])
    return bench_harness.table(["arm", "step ms (quartiles)", "× as fast as DDP", "payload MB"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--out", type=Path, default=HERE / "results.json", help="launches already in it stay")
    parser.add_argument("--commit", default=bench_harness.commit(HERE), help="what is measured, outside of a clone")
    arguments = parser.parse_args()
    found = gs.spawn(measure, 2, arguments.rounds, arguments.batch, timeout=500)[0]
    facts = {"machine": bench_harness.machine(), "commit": arguments.commit, "batch": arguments.batch}
    print(table(facts | found))
    before = json.loads(arguments.out.read_text())["launches"] if arguments.out.exists() else []
    bench_harness.save(arguments.out, {"launches": [*before, facts | found]})


if __name__ == "__main__":
    main()
