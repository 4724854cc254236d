"""`gradsync demo`: a small model trained several ways, and a table that tells the story."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from gradsync.cli.demo.slow_link import link_result
from gradsync.cli.demo.slow_link import text as link_text
from gradsync.cli.demo.slow_link.link_variants import VARIANTS as LINK_VARIANTS
from gradsync.cli.demo.slow_link.privileges import check_link, has_rights, rerun
from gradsync.cli.demo.slow_link.shaped_link import Shaper, bits_per_second
from gradsync.cli.demo.slow_link.train_over_link import train as train_over_link
from gradsync.cli.demo.story import slow_input_text
from gradsync.cli.demo.story import text as story_text
from gradsync.cli.demo.story.corpus import read_library
from gradsync.cli.demo.story.demo_model import DemoShape, build
from gradsync.cli.demo.story.demo_result import DemoResult, sum_up
from gradsync.cli.demo.story.killed_rank import KILL_STEP, RankDeath, SurvivorReport, watch_death
from gradsync.cli.demo.story.slow_input import TRACE, SlowInput, read_slow_input, train_slowly
from gradsync.cli.demo.story.train_variants import DDP, GRADSYNC, MAX_RANKS, VARIANTS, train
from gradsync.cli.gpu_option import add_share_gpus, check_share_gpus
from gradsync.cli.local_ranks import local_ranks
from gradsync.cli.shared import BadInput, Parser, show, whole_number, wide_console

_MAX_THREADS = 4  # per rank: more would only get into each other's way in so small a model
_HOUR_S = 3600.0
_STEPS, _SLOW_STEPS, _LATE_STEPS = 120, 8, 80
_SHAPE = DemoShape()
_SLOW_SHAPE = DemoShape(width=256, batch=4)  # few characters for its size: the link has more to do than the processor

_DESCRIPTION = """\
Trains a small character-level transformer on the Python standard library's source text, on the processors of this
machine, four ways in turn: one process with all threads; ranks without sync; DDP; gradsync. Then a table with
what each costs and whether the replicas are still the same model. About a minute on 2 cores.
"""

_EXAMPLE = """\
example:
  gradsync demo                       2 ranks, the whole story
  gradsync demo --ranks 4 --steps 40  more ranks, fewer steps
  gradsync demo --kill 1              kill rank 1 in the middle of a step: who notices, and when?
  gradsync demo --slow 1              slow rank 1's input down: who is to blame that all ranks are slow?
  gradsync demo --slow-link 100mbit   2 ranks with 100 Mbit/s between them: what does compression buy?
  gradsync demo --share-gpus          on GPUs over NCCL, both ranks on one if there is one
  gradsync demo --json > demo.json    for machines
"""


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    """Put `demo` among the commands."""
    parser = commands.add_parser(
        "demo", help="train a small model with and without gradsync", description=_DESCRIPTION, epilog=_EXAMPLE
    )
    add = parser.add_argument
    add("--ranks", type=whole_number(2, MAX_RANKS), default=2, metavar="N", help="processes to train on (2)")
    add(
        "--steps",
        type=whole_number(6, 100_000),
        metavar="N",
        help=f"training steps of each arm ({_STEPS}, with --slow {_LATE_STEPS}, over a slow link {_SLOW_STEPS})",
    )
    add("--kill", type=whole_number(0, MAX_RANKS - 1), metavar="R", help="kill rank R and show the errors instead")
    add("--slow", type=whole_number(0, MAX_RANKS - 1), metavar="R", help="slow rank R's input and show who is blamed")
    add("--slow-link", type=_rate, metavar="RATE", help="put a link of 10mbit to 10gbit between 2 ranks instead")
    add_share_gpus(parser)
    add("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run, shape=None)


def run(options: argparse.Namespace) -> int:
    """The command."""
    _check(options)
    if options.slow_link is not None:
        return _slow_link(options)
    if options.slow is not None:
        following = 'gs.attach(model, optimizer, trace="run") in your own training; gradsync report run'
        _print(_slow(options), slow_input_text, following, options.json)
        return 0
    options.steps, options.shape = options.steps or _STEPS, _placed(options)
    text = read_library()
    if options.kill is not None:
        _print_deaths(_kill(options), options.json)
    else:
        result = _compare(options, len(text.train))
        _print(result, story_text, "gradsync demo --kill 1    what happens when a rank dies", options.json)
    return 0


def _check(options: argparse.Namespace) -> None:
    for name, rank in (("--kill", options.kill), ("--slow", options.slow)):
        if rank is not None and rank >= options.ranks:
            raise BadInput(
                f"gradsync demo: {name} {rank} names no rank: with --ranks {options.ranks} "
                f"they are 0 to {options.ranks - 1}"
            )
    if options.slow is not None and (options.kill is not None or options.slow_link is not None):
        raise BadInput("gradsync demo: --slow is a story of its own: leave out --kill and --slow-link")
    if options.slow_link is not None and options.share_gpus:
        raise BadInput("gradsync demo: --slow-link trains on processors: leave out --share-gpus")
    check_share_gpus("demo", options.share_gpus, options.ranks)


def _rate(text: str) -> str:
    """A type for `add_argument`: rates that a demo has patience for."""
    try:
        bits = bits_per_second(text)
    except ValueError:
        bits = 0
    if not 10**7 <= bits <= 10**10:
        raise argparse.ArgumentTypeError(f"needs a rate from 10mbit to 10gbit, such as 100mbit, got {text!r}")
    return text


def _slow_link(options: argparse.Namespace) -> int:
    if options.kill is not None or options.ranks != 2:
        raise BadInput("gradsync demo: --slow-link joins 2 ranks, and kills none: leave out --ranks and --kill")
    options.steps, options.shape = options.steps or _SLOW_STEPS, options.shape or _SLOW_SHAPE
    if not has_rights():
        asked = ["--slow-link", options.slow_link, "--steps", str(options.steps)]
        return rerun(["demo", *asked, *(["--json"] if options.json else [])])
    following = "gradsync demo    what it costs to keep replicas the same on one host"
    _print(_train_over(options), link_text, following, options.json)
    return 0


def _train_over(options: argparse.Namespace) -> link_result.LinkResult:
    shaper = Shaper.of(options.slow_link)
    check_link(shaper)
    threads, size = _threads(2), _num_parameters(options.shape)
    if not options.json:
        _introduce(size, len(read_library().train), f"2 ranks of this machine with {options.slow_link} between them")
    title = f"training, {len(LINK_VARIANTS)} arms in turn"
    with local_ranks(2, threads, len(LINK_VARIANTS) * options.steps, title, options.json) as (pool, folder):
        told = pool.run(train_over_link, options.shape, options.steps, shaper, folder, timeout=_HOUR_S)
    records, busy_cores = [records for records, _ in told], told[0][1]
    return link_result.sum_up(records, options.slow_link, threads, options.steps, size, busy_cores)


def _compare(options: argparse.Namespace, num_characters: int) -> DemoResult:
    threads, size = _threads(options.ranks), _num_parameters(options.shape)
    if not options.json:
        _introduce(size, num_characters, f"{options.ranks} ranks of this machine")
    total = len(VARIANTS) * options.steps
    title = "training, 4 arms in turn"
    with local_ranks(options.ranks, threads, total, title, options.json, options.share_gpus) as (pool, folder):
        records = pool.run(train, options.shape, options.steps, folder, timeout=_HOUR_S)
    return sum_up(records, threads, options.steps, size)


def _kill(options: argparse.Namespace) -> list[RankDeath]:
    title, threads = f"training until rank {options.kill} dies, twice", _threads(options.ranks)
    total, on_gpus = 2 * KILL_STEP, options.share_gpus
    with local_ranks(options.ranks, threads, total, title, options.json, on_gpus, mps=False) as (pool, folder):
        return [watch_death(pool, arm, options.kill, options.shape, folder) for arm in (GRADSYNC, DDP)]


def _slow(options: argparse.Namespace) -> SlowInput:
    options.steps, options.shape = options.steps or _LATE_STEPS, _placed(options)
    title, threads = f"training with a trace, rank {options.slow} slowed", _threads(options.ranks)
    with local_ranks(options.ranks, threads, options.steps, title, options.json, options.share_gpus) as (pool, folder):
        told = (options.slow, options.shape, options.steps, folder)
        busy_cores, *_ = pool.run(train_slowly, *told, timeout=_HOUR_S)
        return read_slow_input(Path(folder, TRACE), options.slow, busy_cores)


def _placed(options: argparse.Namespace) -> DemoShape:
    shape: DemoShape = options.shape or _SHAPE
    return replace(shape, device="cuda") if options.share_gpus else shape


def _threads(ranks: int) -> int:
    return min(_MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // ranks))


def _num_parameters(shape: DemoShape) -> int:
    return sum(parameter.numel() for parameter in build(replace(shape, device="cpu")).parameters())


def _introduce(num_parameters: int, num_characters: int, where: str) -> None:
    Console(stderr=True, highlight=False).print(
        f"A transformer of {num_parameters / 1e6:.2f} million parameters learns to guess the next character of the "
        f"Python standard library ({num_characters / 1e6:.1f} MB of it) on {where}."
    )


def _print(
    result: DemoResult | link_result.LinkResult | SlowInput, words: ModuleType, following: str, as_json: bool
) -> None:
    if as_json:
        wide_console().out(json.dumps(result.as_json(), indent=2))
    else:
        console = show([words.table(result)], words.FOOTNOTE, words.sentences(result))
        console.print(f"\nNext: {following}")


def _print_deaths(deaths: list[RankDeath], as_json: bool) -> None:
    console = wide_console()
    if as_json:
        console.out(json.dumps({"command": "demo", "deaths": [death.as_json() for death in deaths]}, indent=2))
        return
    console.print(
        f"Rank {deaths[0].killed} was killed in step {KILL_STEP}, after its forward (SIGKILL). Survivors say:"
    )
    for death in deaths:
        console.print(f"\n[bold]{death.arm}[/bold]")
        for report in death.fates:
            console.print(Padding(_spoken(report), (0, 0, 0, 2)))
    console.print()
    for death in deaths:
        console.print(f"• {death.arm}: {death.summary()}.")
    console.print("\nNext: gradsync demo    what it costs to keep replicas the same")


def _spoken(report: SurvivorReport) -> Text:
    said = report.message if report.error is None else f"{report.error}: {report.message}"
    return Text(f"rank {report.rank} after {report.seconds:.2f} s: {said}")
