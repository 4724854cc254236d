"""What the arguments of every command share: who cannot read one says so, and names its own help."""

from __future__ import annotations

import pytest

from gradsync.cli import main

RUNS = ("watch", "report")  # which need the folder of one


@pytest.mark.parametrize("command", main._COMMANDS)
@pytest.mark.parametrize("order", [1, -1])
def test_what_a_command_does_not_know_is_told_by_itself(
    command: str, order: int, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--nope", *["run"] * (command in RUNS)][::order]
    assert main.main([command, *arguments]) == 2
    said = f"gradsync {command}: unrecognized arguments: --nope; see gradsync {command} --help\n"
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize("command", RUNS)
def test_what_a_command_misses_is_told_by_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([command]) == 2
    said = f"gradsync {command}: the following arguments are required: RUN; see gradsync {command} --help\n"
    assert capsys.readouterr() == ("", said)


def test_what_stands_before_the_command_is_not_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--nope", "doctor"]) == 2
    assert capsys.readouterr() == ("", "gradsync: unrecognized arguments: --nope; see gradsync --help\n")
