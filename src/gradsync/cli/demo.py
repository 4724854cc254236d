"""`gradsync demo`: a small model trained four ways at once, and a table that tells the story."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from gradsync.cli.arguments import BadInput, Parser, whole_number
from gradsync.cli.progress import follow
from gradsync.cli.story.arms import ARMS, DDP, GRADSYNC, MAX_RANKS, train
from gradsync.cli.story.death import KILL_STEP, Death, Fate, watch_death
from gradsync.cli.story.model import Shape, build
from gradsync.cli.story.result import Result, sum_up
from gradsync.cli.story.telling import FOOTNOTE, sentences, table
from gradsync.cli.story.text import read_library
from gradsync.ranks import RankPool

_MAX_THREADS = 4  # per rank: more would only get into each other's way in so small a model
_HOUR_S = 3600.0

_DESCRIPTION = """\
Trains a small character-level transformer on the Python standard library's source text, on the CPUs of this
machine, four ways in turn: one process with all threads; ranks without sync; DDP; gradsync. Then a table with
what each costs and whether the replicas are still the same model. About a minute on 2 cores.
"""

_EXAMPLE = """\
example:
  gradsync demo                       2 ranks, the whole story
  gradsync demo --ranks 4 --steps 40  more ranks, fewer steps
  gradsync demo --kill 1              kill rank 1 in the middle of a step: who notices, and when?
  gradsync demo --json > demo.json    for machines
"""


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    """Put `demo` among the commands."""
    parser = commands.add_parser(
        "demo",
        help="train a small model with and without gradsync",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=whole_number(2, MAX_RANKS), default=2, metavar="N", help="processes to train on (2)")
    add("--steps", type=whole_number(6, 100_000), default=120, metavar="N", help="training steps of each arm (120)")
    add("--kill", type=whole_number(0, MAX_RANKS - 1), metavar="R", help="kill rank R and show the errors instead")
    add("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run, shape=Shape())


def run(options: argparse.Namespace) -> int:
    """The command."""
    if options.kill is not None and options.kill >= options.ranks:
        raise BadInput(
            f"gradsync demo: --kill {options.kill} names no rank: with --ranks {options.ranks} "
            f"they are 0 to {options.ranks - 1}"
        )
    text = read_library()
    if options.kill is not None:
        _print_deaths(_kill(options), options.json)
    else:
        _print_result(_compare(options, len(text.train)), options.json)
    return 0


def _compare(options: argparse.Namespace, num_characters: int) -> Result:
    threads = _threads(options.ranks)
    size = sum(parameter.numel() for parameter in build(options.shape).parameters())
    if not options.json:
        _introduce(size, num_characters, options.ranks)
    with _ranks(options.ranks, threads) as (pool, folder):
        progress = os.path.join(folder, "progress")
        with follow(progress, len(ARMS) * options.steps, "training, 4 arms in turn", quiet=options.json):
            ledgers = pool.run(train, options.shape, options.steps, progress, timeout=_HOUR_S)
    return sum_up(ledgers, threads, options.steps, size)


def _kill(options: argparse.Namespace) -> list[Death]:
    with _ranks(options.ranks, _threads(options.ranks)) as (pool, folder):
        progress = os.path.join(folder, "progress")
        with follow(progress, 2 * KILL_STEP, f"training until rank {options.kill} dies, twice", quiet=options.json):
            return [
                watch_death(pool, arm, options.kill, options.shape, os.path.join(folder, arm), progress)
                for arm in (GRADSYNC, DDP)
            ]


def _threads(ranks: int) -> int:
    return min(_MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // ranks))


@contextmanager
def _ranks(ranks: int, threads: int) -> Iterator[tuple[RankPool, str]]:
    """A pool and a folder for what its ranks write; both are gone afterwards, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="gradsync-demo-") as folder, RankPool(ranks, threads) as pool:
        yield pool, folder


def _introduce(num_parameters: int, num_characters: int, ranks: int) -> None:
    Console(stderr=True, highlight=False).print(
        f"A transformer of {num_parameters / 1e6:.2f} million parameters learns to guess the next character of the "
        f"Python standard library ({num_characters / 1e6:.1f} MB of it) on {ranks} ranks of this machine."
    )


def _print_result(result: Result, as_json: bool) -> None:
    console = _console()
    if as_json:
        console.out(json.dumps(result.as_json(), indent=2))
        return
    console.print(table(result))
    console.print(FOOTNOTE, style="dim")
    console.print()
    for sentence in sentences(result):
        console.print(f"• {sentence}")
    console.print("\nNext: gradsync demo --kill 1    what happens when a rank dies")


def _print_deaths(deaths: list[Death], as_json: bool) -> None:
    console = _console()
    if as_json:
        console.out(json.dumps({"command": "demo", "deaths": [death.as_json() for death in deaths]}, indent=2))
        return
    console.print(
        f"Rank {deaths[0].killed} was killed in step {KILL_STEP}, after its forward (SIGKILL). Survivors say:"
    )
    for death in deaths:
        console.print(f"\n[bold]{death.arm}[/bold]")
        for fate in death.fates:
            console.print(Padding(_spoken(fate), (0, 0, 0, 2)))
    console.print()
    for death in deaths:
        console.print(f"• {death.arm}: {death.summary()}.")
    console.print("\nNext: gradsync demo    what it costs to keep replicas the same")


def _spoken(fate: Fate) -> Text:
    said = fate.message if fate.error is None else f"{fate.error}: {fate.message}"
    return Text(f"rank {fate.rank} after {fate.seconds:.2f} s: {said}")


def _console() -> Console:
    plain = Console(highlight=False)
    # Into a file or pipe there is no width to fit: wide enough that no cell wraps.
    return plain if plain.is_terminal else Console(highlight=False, width=120)
