"""The commands of a page: found in its `sh` and `console` blocks, and read by the parsers of who takes them."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from typing import NamedTuple

from doc_pages import Block, all_blocks

from gradsync.cli import main


class Command(NamedTuple):
    """A command line, what was set before it, where it stands, and what the page says that it prints."""

    words: list[str]
    variables: list[str]
    where: str
    printed: str = ""

    @property
    def line(self) -> str:
        """For messages, and to tell commands apart."""
        return f"{self.where}: {shlex.join(self.words)}"


def commands() -> list[Command]:
    """Of every page."""
    return [command for block in all_blocks("sh", "console") for command in of_block(block)]


def of_block(block: Block) -> list[Command]:
    """In `sh` every line is a command; in `console` those after a dollar are, and what follows is printed."""
    text = block.text.replace("\\\n", " ")
    if block.language == "sh":
        told = [(line, "") for line in text.splitlines()]
    else:
        parts = [part.partition("\n") for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]]
        told = [(line, printed) for line, _, printed in parts]
    return [command for line, printed in told if (command := _command(line, block.where, printed)).words]


def _command(line: str, where: str, printed: str) -> Command:
    words = shlex.split(line, comments=True)
    variables = []
    while words and re.match(r"[A-Z_]+=", words[0]):
        variables.append(words.pop(0).partition("=")[0])
    return Command(words, variables, where, printed)


def inner(words: list[str]) -> list[str] | None:
    """The arguments of the gradsync command in it: by itself, or after a launcher's `--no-python`."""
    if words[0] == "gradsync":
        return words[1:]
    if "gradsync" in words and words[words.index("gradsync") - 1] == "--no-python":
        return words[words.index("gradsync") + 1 :]
    return None


def parsed(arguments: list[str]) -> Namespace:
    """As the command itself would read them; a wrong one raises `BadInput`."""
    return main._parser(arguments).parse_args(arguments)


def is_quick(command: Command) -> bool:
    """Whether it ends in a moment on one machine, and changes nothing there."""
    if command.words[0] != "gradsync" or ">" in command.words:
        return False
    options = parsed(command.words[1:])
    return {
        "plan": True,
        "report": True,
        "doctor": getattr(options, "folder", None) is not None,
        "bench": getattr(options, "draw", None) is not None,
    }.get(command.words[1], False)
