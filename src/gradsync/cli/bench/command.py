"""`gradsync bench`: how fast numbers become their sum, by size, arm and dtype, beside gloo and MPI, or NCCL."""

from __future__ import annotations

import argparse
import json
import os
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from gradsync import files
from gradsync.algorithms.draw import draw
from gradsync.cli.bench.all_reduce_variants import (
    MPI,
    MPI_DTYPES,
    VARIANTS,
    choose_variants,
    misplaced,
    one_host_only,
    parse_variants,
)
from gradsync.cli.bench.bench_config import COLD, DTYPES, WARM, BenchConfig
from gradsync.cli.bench.bench_result import BenchResult, read_result
from gradsync.cli.bench.bench_worker import RESULTS, run_bench
from gradsync.cli.bench.draw_schedule import RECIPES, parse_hosts, sketch
from gradsync.cli.bench.expected_sums import max_ranks
from gradsync.cli.bench.hardware import cores, free_memory_nbytes, machine
from gradsync.cli.bench.memory_bandwidth import sweep_nbytes
from gradsync.cli.bench.mpirun import missing_mpi, run_under_mpirun
from gradsync.cli.bench.plot import plot
from gradsync.cli.bench.rank_exchange import RankSpread, spread_over_hosts
from gradsync.cli.bench.sizes import parse_sizes, show_size
from gradsync.cli.bench.text import footnote, sentences, tables
from gradsync.cli.gpu_option import add_share_gpus, check_share_gpus
from gradsync.cli.local_ranks import local_ranks, rank_folder
from gradsync.cli.shared import BadInput, Parser, check_ranks, check_writable, show, spoken, whole_number, wide_console
from gradsync.cluster import as_hosts
from gradsync.launch.environment import Task, read_task
from gradsync.launch.init import init

_HOUR_S = 3600.0

_MAX_RANKS = 64
_CACHES = {"warm": (WARM,), "cold": (COLD,), "both": (WARM, COLD)}

_DESCRIPTION = """\
Measures all-reduce on CPU tensors in the manner of nccl-tests: time and bandwidth by size. Arms take turns call by
call in the same processes; gloo, and MPI where mpi4py and Open MPI are installed, always take part. Every result is
compared with the exact sum, element by element. About a minute on 2 cores. With --share-gpus the same on tensors of
GPUs, beside NCCL.
"""

_EXAMPLE = """\
example:
  gradsync bench                                      2 ranks or as many as there are cores, 1K to 256M
  gradsync bench --ranks 4 --sizes 1K,1M,25M          some sizes
  gradsync bench --algorithms ring,tree --dtype bf16  other arms, beside the peers; all: every arm there is
  gradsync bench --cache both --busy                  also with cold caches, and while Python computes
  gradsync bench --share-gpus --sizes 1K,1M,25M       on GPUs beside NCCL, all ranks on one if there is one
  gradsync bench --json --plot bench.svg > bench.json for machines, and as a picture
  gradsync bench --draw hierarchical --hosts 2x4      which way the bytes travel; --svg FILE as a picture

under a launcher, on one host or several, each of its processes is a rank:
  torchrun --nproc-per-node 4 --no-python gradsync bench --sizes 1M,25M
"""


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    """Put `bench` among the commands."""
    parser = commands.add_parser(
        "bench", help="measure all-reduce beside gloo and MPI", description=_DESCRIPTION, epilog=_EXAMPLE
    )
    add = parser.add_argument
    add("--ranks", type=whole_number(2, _MAX_RANKS), metavar="N", help="processes to start (one per core, at least 2)")
    add("--sizes", type=spoken(parse_sizes), default="1K..256M", help="as in 1K,1M,25M or 1K..256M (factor 4)")
    add("--dtype", choices=list(DTYPES), default="fp32", help="of the numbers (fp32)")
    add("--algorithms", type=spoken(parse_variants), metavar="LIST", help=f"of {', '.join(VARIANTS)}; or all")
    add("--cache", choices=list(_CACHES), default="warm", help="what the caches hold before a call (warm)")
    add("--busy", action="store_true", help="also measure while the main thread computes in Python")
    add("--rounds", type=whole_number(1, 100_000), metavar="N", help="calls of each arm (as fit into a minute)")
    add("--no-mpi", action="store_true", help="leave MPI out")
    add_share_gpus(parser)
    add("--json", action="store_true", help="print JSON instead of a table")
    add("--plot", type=Path, metavar="FILE", help="write the times by size as SVG")
    add("--draw", choices=list(RECIPES), help="do not measure: print this algorithm's schedule")
    add("--hosts", type=spoken(parse_hosts), metavar="MxG", help="with --draw: M hosts of G ranks")
    add("--svg", type=Path, metavar="FILE", help="with --draw: write the schedule as SVG")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The command."""
    if options.draw is not None:
        return _draw(options)
    for name in ("hosts", "svg"):
        if getattr(options, name) is not None:
            raise BadInput(f"gradsync bench: --{name} is for --draw, for example: gradsync bench --draw tree")
    check_writable("gradsync bench: --plot", options.plot)
    _check_sizes(options)
    if (unfit := misplaced(options.algorithms, options.share_gpus)) is not None:
        why = "in host memory: leave --share-gpus out" if options.share_gpus else "on GPUs: add --share-gpus"
        raise BadInput(f"gradsync bench: {unfit} works {why}")
    task = read_task(os.environ, os.getppid())
    result = _measure_alone(options) if task is None else _measure_as_rank(options, task)
    return 0 if result is None else _show(result, options)


def _draw(options: argparse.Namespace) -> int:
    if options.hosts is not None and options.ranks not in (None, sum(map(len, options.hosts))):
        raise BadInput(f"gradsync bench: --hosts has {sum(map(len, options.hosts))} ranks, --ranks {options.ranks}")
    check_writable("gradsync bench: --svg", options.svg)
    schedule = sketch(options.draw, options.hosts or as_hosts(options.ranks or _default_ranks()))
    if options.svg is None:
        wide_console().out(draw(schedule))
    else:
        files.write(options.svg, draw(schedule, "svg"))
    return 0


def _measure_alone(options: argparse.Namespace) -> BenchResult:
    ranks = options.ranks or (2 if options.share_gpus else _default_ranks())
    check_share_gpus("bench", options.share_gpus, ranks)
    mpi = _wants_mpi(options, missing_mpi())
    arms = choose_variants(options.algorithms, one_host=True, mpi=mpi, gpus=options.share_gpus)
    if not options.share_gpus:
        _check_memory(options.sizes, arms, ranks)
    config = _config(options, arms)
    _introduce(config, f"{ranks} ranks of this machine", options.json)
    return run_alone(config, ranks, quiet=options.json)


def _measure_as_rank(options: argparse.Namespace, task: Task) -> BenchResult | None:
    check_ranks("bench", options.ranks, task)
    no_mpi = None if task.launcher == "Open MPI" and find_spec("mpi4py") else f"{task.launcher} starts no MPI ranks"
    mpi = _wants_mpi(options, no_mpi)
    check_share_gpus("bench", options.share_gpus, ranks=1)
    init(share_gpus=options.share_gpus or None)
    place = spread_over_hosts()
    arms = choose_variants(options.algorithms, place.num_hosts == 1, mpi, options.share_gpus)
    if place.num_hosts > 1 and (misfits := one_host_only(arms)):
        raise BadInput(f"gradsync bench: {misfits[0]} needs all ranks on one host, here are {place.num_hosts}")
    if not options.share_gpus:
        _check_memory(options.sizes, arms, place.ranks_here)
    config = _config(options, arms)
    if task.rank == 0:
        _introduce(config, f"{task.world_size} ranks, {place.ranks_here} of them on this host", options.json)
    result = run_as_rank(config, place, quiet=options.json)
    dist.barrier()
    dist.destroy_process_group()
    return result


def _wants_mpi(options: argparse.Namespace, missing: str | None) -> bool:
    """Return whether MPI takes part; raise BadInput if it was named and cannot."""
    named = options.algorithms is not None and MPI in options.algorithms and set(options.algorithms) != set(VARIANTS)
    if options.share_gpus:
        missing = "it works in host memory"
    elif options.no_mpi:
        missing = "--no-mpi leaves it out"
    elif options.dtype not in MPI_DTYPES:
        missing = f"mpi4py cannot add {options.dtype}"
    if named and missing is not None:
        raise BadInput(f"gradsync bench: mpi cannot take part: {missing}")
    return missing is None


def _config(options: argparse.Namespace, arms: tuple[str, ...]) -> BenchConfig:
    busy = (False, True) if options.busy else (False,)
    device = "cuda" if options.share_gpus else "cpu"
    return BenchConfig(options.sizes, options.dtype, arms, _CACHES[options.cache], busy, options.rounds, device)


def _check_sizes(options: argparse.Namespace) -> None:
    itemsize = DTYPES[options.dtype].itemsize
    for nbytes in options.sizes:
        if nbytes % itemsize:
            raise BadInput(
                f"gradsync bench: {show_size(nbytes)} is no whole number of {options.dtype} elements: "
                f"choose a multiple of {itemsize} bytes"
            )
    if (options.ranks or 0) > (most := max_ranks(DTYPES[options.dtype])):
        raise BadInput(f"gradsync bench: sums of {options.dtype} are exact on up to {most} ranks, got {options.ranks}")


def _check_memory(sizes: tuple[int, ...], arms: tuple[str, ...], ranks: int) -> None:
    """Each rank holds a tensor of each kind, what an algorithm copies, and the buffer that empties caches."""
    kinds = len({VARIANTS[name].shared for name in arms})
    needed, free = ranks * ((kinds + 1) * max(sizes) + sweep_nbytes()), free_memory_nbytes()
    if needed > free:
        raise BadInput(
            f"gradsync bench: {show_size(max(sizes))} on {ranks} ranks needs {needed / 2**30:.1f} GiB of memory, "
            f"{free / 2**30:.1f} GiB are free: choose smaller --sizes or fewer --ranks"
        )


def _show(result: BenchResult, options: argparse.Namespace) -> int:
    if options.plot is not None:
        files.write(options.plot, plot(result))
    if options.json:
        wide_console().out(json.dumps(result.as_json(), indent=1))
    else:
        show(tables(result), footnote(result), sentences(result))
    return 1 if result.wrong else 0


def _introduce(config: BenchConfig, where: str, quiet: bool) -> None:
    if not quiet:
        kind = " in GPU memory" if config.device == "cuda" else ""
        Console(stderr=True, highlight=False).print(f"All-reduce of {config.dtype}{kind} on {where}.")


def _default_ranks() -> int:
    return min(_MAX_RANKS, max(2, cores()))


# How the ranks come to be: started here, by mpirun if MPI takes part and else as a pool, or by a launcher. Each of them
# runs `bench_worker.run_bench`, and rank 0's lines become the result.


def run_alone(config: BenchConfig, ranks: int, quiet: bool) -> BenchResult:
    """Start the ranks on this machine, wait, and read what came of it."""
    threads = max(1, cores() // ranks)
    with local_ranks(ranks, threads, *_extent(config), quiet, config.device == "cuda") as (pool, folder):
        if MPI in config.arms:
            run_under_mpirun(config.as_json(), ranks, threads, folder, _HOUR_S)
        else:
            pool.run(run_bench, config.as_json(), folder, timeout=_HOUR_S)
        return _read(folder, config, ranks, hosts=1, threads=threads)


def run_as_rank(config: BenchConfig, place: RankSpread, quiet: bool) -> BenchResult | None:
    """Take part in a group that exists; the result on rank 0, None elsewhere."""
    if dist.get_rank() != 0:
        run_bench(config.as_json(), folder="")
        return None
    with rank_folder(*_extent(config), quiet) as folder:
        run_bench(config.as_json(), folder)
        return _read(folder, config, dist.get_world_size(), place.num_hosts, torch.get_num_threads())


def _extent(config: BenchConfig) -> tuple[int, str]:
    """Return how many lines rank 0 will write, and what they are."""
    return 2 + config.num_comparisons, f"measuring, {len(config.arms)} arms in turn"


def _read(folder: str, config: BenchConfig, ranks: int, hosts: int, threads: int) -> BenchResult:
    lines = (Path(folder) / RESULTS).read_text().splitlines()
    return read_result(lines, ranks, config.dtype, machine(hosts, threads))
