"""The program of each rank of a bench, whoever started it: all arms on every size, in turn, each result checked.

    for every size, cache and kind of main thread            one turn of an arm
      round 0   gloo | mpi | shared | any    not counted      fill with this rank's numbers
      round 1   mpi | gloo | any | shared                     cold: sweep the caches
      round 2   shared | any | mpi | gloo                     meet, t0, all-reduce, t1
      ...       in an order that is drawn anew                compare every element with the sum

A sample is the longest of the ranks' t1 − t0. Small data in warm caches is reduced many times in a row, as
nccl-tests does: one call after a pause would measure the pause; it is checked by a call of its own before.
Rank 0 appends results to a file as JSON lines.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

from gradsync.cli.bench.all_reduce_variants import VARIANTS, AllReduceVariant, Call
from gradsync.cli.bench.bench_config import COLD, DTYPES, BenchConfig, Setting
from gradsync.cli.bench.call_timer import Clock, clock
from gradsync.cli.bench.expected_sums import ExpectedSums
from gradsync.cli.bench.memory_bandwidth import make_sweep, memory_bandwidth
from gradsync.cli.bench.other_processes import OtherProcesses
from gradsync.cli.bench.rank_barrier import RankBarrier, open_barrier
from gradsync.cli.bench.rank_exchange import collect, decide, spread_over_hosts
from gradsync.cli.local_ranks import advance
from gradsync.exchange.all_reduce import shared_empty

RESULTS = "results"

_SECONDS = 40.0  # for all rounds of all comparisons together, if their number is left to us
_FEWEST, _MOST = 5, 300  # rounds
_SMALL_NBYTES, _IN_A_ROW = 64 << 10, 20

Record = Callable[[dict[str, Any]], None]


def run_bench(config: str, folder: str) -> None:
    """Measure what the config says, in a group that exists; rank 0 writes into the folder."""

    def record(line: dict[str, Any]) -> None:
        with (Path(folder) / RESULTS).open("a") as file:
            file.write(json.dumps(line) + "\n")
        advance(folder)

    measure(BenchConfig.from_json(config), VARIANTS, record)


def measure(config: BenchConfig, arms: Mapping[str, AllReduceVariant], record: Record) -> None:
    """Run every comparison; `record` is called on rank 0: for memory, each comparison, and other processes at last."""
    one_host = spread_over_hosts().num_hosts == 1
    sweep, on_gpu = make_sweep(config.device), config.device == "cuda"
    with open_barrier(one_host) as barrier:
        bandwidth = memory_bandwidth(barrier, sweep) if one_host and not on_gpu else None
        if dist.get_rank() == 0:
            record({"memory_bandwidth": bandwidth})
        others = OtherProcesses() if one_host else None
        expected = ExpectedSums(dist.get_rank(), dist.get_world_size(), DTYPES[config.dtype], config.device)
        for nbytes in config.sizes:
            bench = _Bench(config, nbytes, {name: arms[name] for name in config.arms}, expected, barrier, sweep)
            for setting in config.settings():
                cells = bench.run(setting)
                if dist.get_rank() == 0:
                    record({"cells": cells})
        busy = None if others is None else others.cores()
        if dist.get_rank() == 0:
            record({"busy_cores": busy, "gpu": torch.cuda.get_device_name() if on_gpu else None})


@dataclass
class _VariantTimes:
    """An arm at work on one size, under one setting."""

    name: str
    tensor: torch.Tensor
    call: Call
    seconds: list[float] = field(default_factory=list)
    wrong: int = 0


class _Bench:
    """All arms on one size. Those that work on plain tensors share one: none has the better memory by luck."""

    def __init__(
        self,
        config: BenchConfig,
        nbytes: int,
        arms: Mapping[str, AllReduceVariant],
        expected: ExpectedSums,
        barrier: RankBarrier,
        sweep: torch.Tensor,
    ) -> None:
        self._config, self._nbytes, self._expected, self._barrier, self._sweep = (
            config,
            nbytes,
            expected,
            barrier,
            sweep,
        )
        dtype = DTYPES[config.dtype]
        numel = nbytes // dtype.itemsize
        tensors = {
            shared: _make_tensor(numel, dtype, shared, config.device)
            for shared in sorted({a.shared for a in arms.values()})
        }
        self._calls = [(name, tensors[arm.shared], arm.bind(tensors[arm.shared])) for name, arm in arms.items()]

    def run(self, setting: Setting) -> list[dict[str, Any]]:
        """One comparison; the cells on rank 0, nothing elsewhere."""
        entries = [_VariantTimes(name, tensor, call) for name, tensor, call in self._calls]
        with clock(setting.busy) as watch:
            self._round(entries, 0, setting, watch)  # connections are made, pages touched, rounds estimated
            start = time.perf_counter()
            self._round(entries, 1, setting, watch)
            rounds = self._num_rounds(time.perf_counter() - start)
            for number in range(2, rounds + 1):
                self._round(entries, number, setting, watch)
        cells = [self._close(entry, setting) for entry in entries]
        return cells if dist.get_rank() == 0 else []

    def _round(self, entries: list[_VariantTimes], number: int, setting: Setting, watch: Clock) -> None:
        for entry in Random(number).sample(entries, len(entries)):  # the same order on every rank
            self._expected.fill(entry.tensor)
            if setting.cache == COLD:
                self._sweep.neg_()
            seconds = self._time(watch, entry.call)
            entry.wrong += self._expected.count_wrong(entry.tensor)
            if setting.cache != COLD and self._nbytes <= _SMALL_NBYTES:
                seconds = self._time(watch, partial(_repeat, entry.call)) / _IN_A_ROW
            if number > 0:
                entry.seconds.append(seconds)

    def _time(self, watch: Clock, call: Call) -> float:
        if self._config.device == "cuda":
            torch.cuda.synchronize()
            call = partial(_finish, call, torch.cuda.current_device())
        seconds = watch(self._barrier.arrive, call)
        self._barrier.arrive()  # where ranks share cores, who is done would take one from who is not, for checking
        return seconds

    def _num_rounds(self, round_s: float) -> int:
        if self._config.rounds is not None:
            return self._config.rounds
        fitting = int(_SECONDS / self._config.num_comparisons / round_s)
        return decide(min(_MOST, max(_FEWEST, fitting)))[0]

    def _close(self, entry: _VariantTimes, setting: Setting) -> dict[str, Any]:
        rows = collect([*entry.seconds, entry.wrong])
        return {
            "arm": entry.name,
            "nbytes": self._nbytes,
            "cache": setting.cache,
            "busy": setting.busy,
            "samples": [max(turn) for turn in zip(*(row[:-1] for row in rows), strict=True)],
            "wrong": int(sum(row[-1] for row in rows)),
        }


def _repeat(call: Call) -> None:
    for _ in range(_IN_A_ROW):
        call()


def _finish(call: Call, device: int) -> None:
    """Call, and wait until the GPU is done too; not the current one, which each thread has its own of."""
    call()
    torch.cuda.synchronize(device)


def _make_tensor(numel: int, dtype: torch.dtype, shared: bool, device: str) -> torch.Tensor:
    return shared_empty(numel, dtype) if shared else torch.empty(numel, dtype=dtype, device=device)
