"""What every command's arguments share: bad input ends with exit code 2 and one sentence.

Where results are printed.

Progress of work that other processes do: they append a byte per step to a file, this side looks at its size.

A file needs no connection that could break or block: a rank that is killed leaves a shorter file, no more.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

T = TypeVar("T")


class BadInput(Exception):
    """The user asked for something that cannot be; the message is the sentence to show."""


class Parser(argparse.ArgumentParser):
    """An argument parser that answers bad input with one sentence instead of the usage."""

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


def wide_console() -> Console:
    """Stdout; into a file or pipe there is no width to fit, so wide enough that no cell wraps."""
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=120)


_LOOK_S = 0.2

Show = Callable[[int], None]


def advance(path: str) -> None:
    """One step more is done."""
    with open(path, "ab") as file:
        file.write(b".")


@contextmanager
def follow(path: str, total: int, title: str, quiet: bool = False) -> Iterator[None]:
    """While the block runs, show how far the file says the work is: a bar on a terminal, else a few lines.

    On stderr, so that stdout holds only the result. `quiet` leaves out the lines, not the bar.
    """
    console = Console(stderr=True)
    with _bar(console, total, title) if console.is_terminal else _lines(total, title, quiet) as show:
        stop = threading.Event()
        thread = threading.Thread(target=_poll, args=(path, show, stop), name="gradsync-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def _poll(path: str, show: Show, stop: threading.Event) -> None:
    while not stop.wait(_LOOK_S):
        show(_steps(path))
    show(_steps(path))


def _steps(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except FileNotFoundError:
        return 0


@contextmanager
def _bar(console: Console, total: int, title: str) -> Iterator[Show]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def _lines(total: int, title: str, quiet: bool) -> Iterator[Show]:
    shown = -1

    def show(done: int) -> None:
        nonlocal shown
        quarter = 4 * done // total
        if quarter > shown and not quiet:
            shown = quarter
            print(f"{title}: {done} of {total}", file=sys.stderr, flush=True)

    yield show
