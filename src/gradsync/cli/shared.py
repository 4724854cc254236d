"""The common part of every command: the arguments' types and parser, and the printing of results.

Bad input ends with exit code 2 and one sentence.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rich.console import Console
from rich.table import Table

from gradsync import files
from gradsync.launch.environment import Task

T = TypeVar("T")


class BadInput(Exception):
    """The user asked for something that cannot be; the message is the sentence to show."""


class Parser(argparse.ArgumentParser):
    """An argument parser that answers bad input with one sentence instead of the usage, and keeps texts as written."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Nobody asks for what is left over: the command that cannot read it says so, not the one above it."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{self.prog}: {message}; see {self.prog} --help")


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """A type for `add_argument`: whole numbers from `low` to `high`.

    >>> whole_number(2, 16)("4")
    4
    """

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"needs a whole number from {low} to {high}, got {text!r}")
        return number

    return parse


def spoken(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A type for `add_argument` whose own sentence reaches the user."""

    def parse_argument(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_argument


def check_writable(option: str, path: Path | None, is_ours: Callable[[Path], bool] = lambda path: True) -> None:
    """Say before any work that ends with this file that it cannot be written, or that something else would be lost.

    `option` is named with its command.
    """
    if path is None:
        return
    try:
        files.check_writable(path)
        other = path.exists() and path.stat().st_size > 0 and not is_ours(path)
    except OSError as error:
        raise BadInput(
            f"{option} {path} cannot be written: {error.strerror}; name a file in a folder that exists"
        ) from None
    if other:
        raise BadInput(f"{option} {path} is something else already: name another file, or remove it")


def check_ranks(command: str, ranks: int | None, task: Task) -> None:
    """Check the number of ranks: under a launcher it is that of the ranks it started."""
    if ranks not in (None, task.world_size):
        raise BadInput(
            f"gradsync {command}: --ranks {ranks}, but {task.launcher} started {task.world_size}: leave --ranks out"
        )


def show(tables: Sequence[Table], footnote: str, sentences: Sequence[str], soft_wrap: bool = False) -> Console:
    """Print a result, and return where more of it may follow."""
    console = wide_console()
    for table in tables:
        console.print(table)
    console.print(footnote, style="dim")
    console.print()
    for sentence in sentences:
        console.print(f"• {sentence}", soft_wrap=soft_wrap and not console.is_terminal, markup=False)
    return console


def wide_console() -> Console:
    """Stdout; into a file or pipe there is no width to fit, so wide enough that no cell wraps."""
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=120)
