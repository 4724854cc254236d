"""What the arguments of every command share, and where results are printed.

Bad input ends with exit code 2 and one sentence.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn, TypeVar

from rich.console import Console

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
