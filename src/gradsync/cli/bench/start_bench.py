"""How the ranks come to be: started here, by mpirun if MPI takes part and else as a pool, or by a launcher.

    gradsync bench --ranks 4                                    pool or mpirun: this process waits and reads
    torchrun --nproc-per-node 4 --no-python gradsync bench      launcher: this process is a rank itself

In all three every rank runs `worker.compete`, and rank 0's lines become the result.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from gradsync.cli.bench.arms import MPI
from gradsync.cli.bench.bench_worker import RESULTS, compete
from gradsync.cli.bench.hardware import cores, machine
from gradsync.cli.bench.mpirun import run_under_mpirun
from gradsync.cli.bench.question import BenchQuestion
from gradsync.cli.bench.rank_exchange import RankSpread
from gradsync.cli.bench.result import BenchResult, read_result
from gradsync.cli.local_ranks import local_ranks, rank_folder

_HOUR_S = 3600.0


def run_alone(question: BenchQuestion, ranks: int, quiet: bool) -> BenchResult:
    """Start the ranks on this machine, wait, and read what came of it."""
    threads = max(1, cores() // ranks)
    with local_ranks(ranks, threads, *_extent(question), quiet) as (pool, folder):
        if MPI in question.arms:
            run_under_mpirun(question.as_json(), ranks, threads, folder, _HOUR_S)
        else:
            pool.run(compete, question.as_json(), folder, timeout=_HOUR_S)
        return _read(folder, question, ranks, hosts=1, threads=threads)


def run_as_rank(question: BenchQuestion, place: RankSpread, quiet: bool) -> BenchResult | None:
    """Take part in a group that exists; the result on rank 0, None elsewhere."""
    if dist.get_rank() != 0:
        compete(question.as_json(), folder="")
        return None
    with rank_folder(*_extent(question), quiet) as folder:
        compete(question.as_json(), folder)
        return _read(folder, question, dist.get_world_size(), place.num_hosts, torch.get_num_threads())


def _extent(question: BenchQuestion) -> tuple[int, str]:
    """How many lines rank 0 will write, and what they are."""
    return 2 + question.num_contests, f"measuring, {len(question.arms)} arms in turn"


def _read(folder: str, question: BenchQuestion, ranks: int, hosts: int, threads: int) -> BenchResult:
    lines = (Path(folder) / RESULTS).read_text().splitlines()
    return read_result(lines, ranks, question.dtype, machine(hosts, threads))
