"""`gradsync probe`: what the links and ranks can do here, measured, for `gradsync plan`."""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path

import torch.distributed as dist

from gradsync.cli.gpu_option import add_share_gpus, check_share_gpus
from gradsync.cli.local_ranks import measure_alone, measure_as_rank
from gradsync.cli.plan.figures import printable
from gradsync.cli.probe.text import FOOTNOTE, as_json, sentences, tables
from gradsync.cli.shared import BadInput, Parser, check_ranks, check_writable, show, whole_number, wide_console
from gradsync.cluster import Cluster
from gradsync.launch.environment import Task, read_task
from gradsync.launch.init import init
from gradsync.probe.measure import STAGES, ProbeFindings, measure

_DEFAULT_RANKS, _MAX_RANKS = 2, 64
_BOUND_S = 600.0

_DESCRIPTION = """\
Measures latency and bandwidth between hosts, inside them and in shared memory, how fast compressors are, and how
evenly ranks compute; names the rank or link that is slower than the others; writes a cluster file to plan by.
Half a minute. Nothing else should run meanwhile.
"""

_EXAMPLE = """\
example:
  gradsync probe                               2 ranks of this machine; writes cluster.toml
  gradsync probe --ranks 4 --out box.toml      4 ranks, another file
  gradsync probe --share-gpus                  2 ranks over NCCL, on one GPU if there is one
  gradsync plan --cluster box.toml --params 1e9 --tokens 8192

under a launcher, on one host or several, each of its processes is a rank; rank 0 writes the file:
  torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --no-python gradsync probe
"""


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    """Put `probe` among the commands."""
    parser = commands.add_parser(
        "probe", help="measure the links and ranks, for gradsync plan", description=_DESCRIPTION, epilog=_EXAMPLE
    )
    add = parser.add_argument
    add("--ranks", type=whole_number(2, _MAX_RANKS), metavar="N", help=f"processes to start ({_DEFAULT_RANKS})")
    add("--out", type=Path, default=Path("cluster.toml"), metavar="FILE", help="where to write it (cluster.toml)")
    add(
        "--brief", action="store_true", help="a few seconds: fewer sizes, no check of the fit, no search for slow links"
    )
    add_share_gpus(parser)
    add("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The command."""
    task = read_task(os.environ, os.getppid())
    if task is None and {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        raise BadInput(
            "gradsync probe: the launcher started 1 rank (WORLD_SIZE=1), and one rank has no links: "
            "start 2 or more, or call gradsync probe without a launcher"
        )
    if task is None or task.rank == 0:
        _check_file(options.out)
    if task is None:
        ranks = options.ranks or _DEFAULT_RANKS
        check_share_gpus("probe", options.share_gpus, ranks)
        act = partial(measure, brief=options.brief)
        findings = measure_alone(act, ranks, len(STAGES), options.json, _BOUND_S, options.share_gpus)
    else:
        findings = _probe_under_launcher(options, task)
    if task is None or task.rank == 0:
        _save(findings.cluster, options.out)
        _show(findings, options)
    return 0


def _probe_under_launcher(options: argparse.Namespace, task: Task) -> ProbeFindings:
    check_ranks("probe", options.ranks, task)
    check_share_gpus("probe", options.share_gpus, ranks=1)
    init(share_gpus=options.share_gpus or None)
    findings = measure_as_rank(partial(measure, brief=options.brief), len(STAGES), options.json)
    dist.barrier()
    dist.destroy_process_group()
    return findings


def _check_file(path: Path) -> None:
    """Check, before anything is measured, that the file can be written, and that nothing else is lost by it."""
    check_writable("gradsync probe: --out", path)
    try:
        if path.exists() and path.stat().st_size:
            Cluster.load(path)
    except OSError as error:
        raise BadInput(f"gradsync probe: --out {path} cannot be read: {error.strerror}; name another file") from None
    except (ValueError, TypeError) as error:
        raise BadInput(
            f"gradsync probe: --out {path} exists and is no cluster file ({printable(str(error))}): name another file"
        ) from None


def _save(cluster: Cluster, path: Path) -> None:
    try:
        cluster.save(path)
    except OSError as error:
        raise BadInput(
            f"gradsync probe: --out {path} cannot be written: {error.strerror or error}; name another file"
        ) from None


def _show(findings: ProbeFindings, options: argparse.Namespace) -> None:
    if options.json:
        wide_console().out(json.dumps(as_json(findings, options.out), indent=1))
    else:
        show(tables(findings), FOOTNOTE, sentences(findings, options.out), soft_wrap=True)
