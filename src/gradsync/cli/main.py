"""`gradsync`: finds the command, runs it, and turns what went wrong into an exit code.

0    done
1    the run itself failed
2    bad input, with one sentence
130  Ctrl-C        143  SIGTERM
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import FrameType

from gradsync.cli.shared import BadInput, Parser
from gradsync.errors import GradSyncError

_EXAMPLE = """\
example:
  gradsync demo            train a small model on 2 processes of this machine, with and without gradsync
  gradsync demo --help     what can be changed about it
  gradsync bench           how fast all-reduce is here, beside gloo and MPI
  gradsync probe           what the links and ranks here can do, measured
  gradsync plan --help     what synchronization will cost on a cluster, and what to do about it
  gradsync report RUN      what it did cost in a traced run, and who is to blame
  gradsync watch RUN       follow a run that writes a trace, in a browser or with --terminal
  gradsync doctor          what is wrong here, and the command that mends it; doctor RUN: what happened first in a run
"""

_COMMANDS = ("demo", "bench", "plan", "probe", "watch", "report", "doctor")  # modules beside this one


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        with _terminable():
            options = _parser(arguments).parse_args(arguments)
            return int(options.run(options))
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    except GradSyncError as error:
        print(f"gradsync: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser(arguments: Sequence[str]) -> Parser:
    """The parser for these arguments: only the command that they name is imported, since each takes its time."""
    parser = Parser(
        prog="gradsync",
        description="Keeps the replicas of a data-parallel PyTorch training run in step, and says what that costs.",
        epilog=_EXAMPLE,
    )
    parser.add_argument("--version", action="version", version=f"gradsync {_version()}")
    parser.set_defaults(run=_no_command)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in [name for name in _COMMANDS if name in arguments[:1]] or _COMMANDS:
        import_module(f"gradsync.cli.{name}.command").add_parser(commands)
    return parser


def _version() -> str:
    try:
        return version("gradsync")
    except PackageNotFoundError:
        return "(from a folder, not installed)"


def _no_command(_: object) -> int:
    raise BadInput("gradsync: name a command, for example: gradsync demo; see gradsync --help")


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM (from `timeout`, say) unwinds as an exception, so that ranks and files are cleaned up."""

    def terminate(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
