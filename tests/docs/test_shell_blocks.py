"""Every command of every page is one that its program takes; quick ones run, and print what is shown."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from doc_commands import Command, commands, inner, is_quick, parsed
from doc_pages import PAGES, ROOT, all_blocks, read
from torch.distributed.run import get_args_parser

from gradsync.cli.main import main

COMMANDS = commands()
QUICK = list({tuple(command.words): command for command in COMMANDS if is_quick(command)}.values())


def of(program: str) -> list[Command]:
    return [command for command in COMMANDS if command.words[0] == program]


def test_every_shell_block_is_shell() -> None:
    for block in all_blocks("sh"):
        checked = subprocess.run(["bash", "-n"], input=block.text, text=True, capture_output=True, timeout=10)
        assert checked.returncode == 0, f"{block.where}: {checked.stderr}"


def test_gradsync_takes_every_command_as_it_stands() -> None:
    taken = [parsed(arguments) for command in COMMANDS if (arguments := inner(command.words)) is not None]
    assert len(taken) > 20


def test_torchrun_takes_every_command_as_it_stands() -> None:
    for command in of("torchrun"):
        options = get_args_parser().parse_args(command.words[1:])
        assert options.training_script in ("train.py", "gradsync") or (ROOT / options.training_script).exists()
        assert options.training_script != "gradsync" or options.no_python, command.line
    assert len(of("torchrun")) > 3


def test_variables_targets_files_and_extras_exist() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    for name in {name for command in COMMANDS for name in command.variables if name.startswith("GRADSYNC_")}:
        assert f'"{name}"' in source, name
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {command.words[1] for command in of("make")} <= set(targets)
    for command in COMMANDS:
        ours = [word for word in command.words if word.startswith(("examples/", "benchmarks/", "docs/", "tests/"))]
        assert all((ROOT / word).exists() for word in ours), command.line
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for page in PAGES:
        assert {
            extra for named in re.findall(r"gradsync\[([\w,]+)\]", read(page)) for extra in named.split(",")
        } <= set(extras), page


@pytest.mark.parametrize("command", QUICK, ids=[command.line for command in QUICK])
def test_a_quick_command_runs(command: Command, workplace: Path, said: Callable[[], Any]) -> None:
    with chdir(workplace):
        code = main(command.words[1:])
    assert code == 0 or (code == 1 and command.words[1] == "doctor"), said()
    printed = said()
    for line in command.printed.splitlines():
        assert " ".join(line.split()) in printed, f"{command.line} prints {printed}"
