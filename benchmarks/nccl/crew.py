"""A rank among its peers: the group, how all begin and end a measurement together, and what rank 0 writes down."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import bench_harness
from nccl.launch import MARK

_TOLD_NBYTES = 500  # of what went wrong on a rank
_TIMEOUT = timedelta(seconds=120)


class Measured(NamedTuple):
    """Seconds by the clock, and of all threads of the process, of the rank that took most."""

    wall_s: float
    cpu_s: float


class Crew:
    """What every part needs; made once in each rank."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.dry, self.until = bool(job["dry"]), float(job["until"])
        rank = os.environ["RANK"]
        # NCCL takes ranks of one GPU for a mistake, unless they say that they are on different hosts.
        os.environ.update(NCCL_HOSTID=f"h{rank}", NCCL_IB_DISABLE="1")
        os.environ["NCCL_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"]
        self.device = torch.device("cpu" if self.dry else "cuda:0")
        if not self.dry:
            torch.cuda.set_device(0)
        dist.init_process_group("gloo" if self.dry else "cpu:gloo,cuda:nccl", timeout=_TIMEOUT)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def most(self, *numbers: float) -> list[float]:
        """The largest over the ranks of each number; in host memory, so not by NCCL."""
        told = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return [float(number) for number in told]

    def meet(self) -> None:
        self.settle()
        self.most(0.0)

    def agree(self, problem: str) -> str:
        """What went wrong on any rank: all go on, or all leave it out."""
        row = torch.zeros(_TOLD_NBYTES, dtype=torch.uint8)
        said = problem.encode()[:_TOLD_NBYTES]
        row[: len(said)] = torch.tensor(list(said), dtype=torch.uint8)
        rows = [torch.zeros_like(row) for _ in range(self.size)]
        dist.all_gather(rows, row)
        told = [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in rows]
        return next((f"rank {rank}: {text}" for rank, text in enumerate(told) if text), "")

    def over(self, needed_s: float = 0.0) -> bool:
        """Whether less than so many seconds are left for measuring; all ranks get the same answer."""
        return self.left_s() <= needed_s

    def left_s(self) -> float:
        """The seconds that are left for measuring, on the rank that has least."""
        return -self.most(time.time() - self.until)[0]

    def timed(self, work: Callable[[], object], times: int, takes_part: bool = True) -> Measured:
        """Of one call, from when all ranks begin to when the last is done."""
        self.meet()
        begun, used = time.perf_counter(), time.process_time()
        if takes_part:
            for _ in range(times):
                work()
        self.settle()
        wall_s, cpu_s = time.perf_counter() - begun, time.process_time() - used
        return Measured(*self.most(wall_s / times, cpu_s / times if takes_part else 0.0))

    def say(self, cell: str, **facts: Any) -> None:
        """Let a cell be kept as it is now; what is said of it later takes its place."""
        if self.rank == 0:
            print(MARK + json.dumps({"cell": cell, **self._facts(), **facts}), flush=True)

    def note(self, text: str) -> None:
        """Let a line be shown."""
        if self.rank == 0:
            print(MARK + json.dumps({"note": text}), flush=True)

    def _facts(self) -> dict[str, Any]:
        machine = bench_harness.machine()
        if not self.dry:
            machine |= {
                "cuda": torch.version.cuda,
                "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
                "mps": "CUDA_MPS_PIPE_DIRECTORY" in os.environ,
            }
        return {"machine": machine, "dry": self.dry}

    def leave(self) -> None:
        self.meet()
        dist.destroy_process_group()
