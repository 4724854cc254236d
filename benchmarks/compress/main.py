"""What does compression cost beside a copy, eager torch, torch.compile and PyTorch's hooks, and when does it pay?

python benchmarks/compress/main.py                   # on a GPU: 2.5e8 elements, about two minutes
python benchmarks/compress/main.py --device cpu      # 1.2e7 elements, one thread, without torch.compile
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import variants  # noqa: E402

import bench_harness  # noqa: E402
import report  # noqa: E402

NUM_MATRICES = {"cuda": 106, "cpu": 5}
HEAD_START_CYCLES = 2_000_000  # a millisecond
WARM_UP = 2  # rounds; kernels are compiled in the first


def seconds(act: variants.Act, device: str) -> float:
    """One turn. The tensors are many times the caches: nothing of the last turn is in them."""
    if device == "cpu":
        start = time.perf_counter()
        act()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START_CYCLES)  # the host queues meanwhile: what is measured is the device
    begin.record()
    act()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def turn(task: variants.Task, act: variants.Act, device: str) -> float:
    task.reset()
    return seconds(act, device)


def measure(device: str, rounds: int, compiled: bool) -> dict[str, Any]:
    """Samples of every arm; those of one method take turns with a copy."""
    buffers = variants.make_buffers(NUM_MATRICES[device], device)
    size = buffers.flat.numel()
    results: dict[str, Any] = {"num_elements": size, "methods": {}}
    for task in variants.tasks(buffers, compiled):
        acts = {**task.arms, "copy": lambda: buffers.out.copy_(buffers.flat)}
        turns = {name: partial(turn, task, act, device) for name, act in acts.items()}
        bench_harness.interleave(turns, WARM_UP)
        samples = bench_harness.interleave(turns, rounds)
        assert bool(buffers.residual.isfinite().all())
        results["methods"][task.name] = {
            "num_elements": size,
            "fewest_nbytes": task.fewest_nbytes,
            "sent_nbytes": task.sent_nbytes,
            "samples": {name: [round(value, 7) for value in values] for name, values in samples.items()},
        }
        print(task.name, {name: f"{1e3 * median(each):.3f} ms" for name, each in samples.items()}, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile; so on the CPU in any case")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    parser.add_argument("--commit", default=bench_harness.commit(HERE), help="what is measured, outside of a clone")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    gc.disable()
    results = measure(given.device, given.rounds, given.device == "cuda" and not given.no_compile)
    facts = {"machine": bench_harness.machine(), "commit": given.commit, "results": results}
    bench_harness.save(given.out, {given.device: facts})
    print("\n" + report.tables(results))


if __name__ == "__main__":
    main()
