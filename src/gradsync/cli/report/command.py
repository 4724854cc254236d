"""`gradsync report`: what synchronization cost in a run, and who is to blame."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from gradsync import files
from gradsync.cli.report.text import tell, tell_both
from gradsync.cli.shared import BadInput, Parser, check_writable, whole_number, wide_console
from gradsync.report.compare import Comparison, compare
from gradsync.report.summary import Summary, summarize
from gradsync.report.wording import clean, printable
from gradsync.trace.reader import RunTrace, read_run

# Of the JSON, whose fields are a promise, told in docs/report.md.
VERSION = 1  # goes up when a field changes its meaning or goes away; new ones may come at any time
_DESCRIPTION = """\
Reads the traces that all ranks of a run have written, also while it still runs: what synchronization costs, which rank
the others wait for and in what, which link is slow, and what to do about it. docs/report.md explains every number.
"""

_EXAMPLE = """\
example:
  gradsync report run/                          gs.attach(..., trace="run"), or GRADSYNC_TRACE=run
  gradsync report run/ --last 200               only the last 200 steps
  gradsync report run/ --html run.html          one page with pictures
  gradsync report run/ --perfetto run.json      for ui.perfetto.dev
  gradsync report before/ after/                two runs, side by side
"""

_FILES = {"html": "<!DOCTYPE html>", "perfetto": "{", "prometheus": "#"}  # option: how what it writes begins


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    """Put `report` among the commands."""
    parser = commands.add_parser(
        "report",
        help="what synchronization cost in a run, and who is to blame",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="the folder that was traced to; two of them are compared")
    add("--last", type=whole_number(1, 10**9), metavar="N", help="only the last N steps")
    add("--json", action="store_true", help="print JSON instead of sentences")
    add("--html", type=Path, metavar="FILE", help="write a page with pictures, in one file")
    add("--perfetto", type=Path, metavar="FILE", help="write a timeline for ui.perfetto.dev or chrome://tracing")
    add("--tensorboard", type=Path, metavar="FOLDER", help="write scalars for TensorBoard")
    add("--prometheus", type=Path, metavar="FILE", help="write metrics for the node exporter's textfile collector")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The command."""
    if len(options.runs) > 2:
        raise BadInput(f"gradsync report: two runs can be compared, got {len(options.runs)}: name one or two folders")
    _check_files(options)
    traces = [_read(folder) for folder in options.runs]
    summaries = [summarize(trace, options.last) for trace in traces]
    console = wide_console()
    if len(summaries) == 2:
        first, second = summaries
        names = _names(*options.runs)
        compared = compare(first, second, names)
        if options.json:
            console.out(json.dumps(both_as_json(first, second, compared, names), indent=1))
        else:
            tell_both(console, compared, names, (first.verdict, second.verdict))
        return 0
    written = _export(options, traces[0], summaries[0])
    if options.json:
        console.out(json.dumps(as_json(summaries[0], str(options.runs[0])), indent=1))
        return 0
    tell(console, summaries[0])
    for sentence in written:
        console.print(sentence, style="dim", markup=False)
    return 0


def _read(folder: Path) -> RunTrace:
    try:
        return read_run(folder)
    except (ValueError, OSError) as error:
        raise BadInput(f"gradsync report: {clean(str(error))}") from None


def _names(first: Path, second: Path) -> tuple[str, str]:
    """The names of the runs, as short as tells them apart."""
    names = (first.name or str(first), second.name or str(second))
    a, b = (str(first), str(second)) if names[0] == names[1] else names
    return printable(a), printable(b)


def _check_files(options: argparse.Namespace) -> None:
    """Say at once, before anything is read, what is in the way; nothing of somebody else's is overwritten."""
    for option in (*_FILES, "tensorboard"):
        path: Path | None = getattr(options, option)
        if path is None:
            continue
        if len(options.runs) == 2:
            raise BadInput(f"gradsync report: --{option} shows one run: name one folder, or leave --{option} out")
        folder = path if option == "tensorboard" and path.exists() else path.parent
        if option in _FILES:
            check_writable(f"gradsync report: --{option}", path, partial(_is_ours, beginning=_FILES[option]))
        elif not folder.is_dir():
            raise BadInput(f"gradsync report: --{option} {path} cannot be written: name a file in a folder that exists")


def _is_ours(path: Path, beginning: str) -> bool:
    try:
        return files.beginning(path, len(beginning)) == beginning.encode("ascii")
    except OSError:
        return False


def _export(options: argparse.Namespace, trace: RunTrace, summary: Summary) -> list[str]:
    """Write what was asked for; a sentence on each. Each exporter is imported only when it is needed."""
    told = []
    if options.html is not None:
        from gradsync.report.page import page

        _write("html", options.html, lambda path: files.write(path, page(trace, summary)))
        told.append(f"Written: {options.html}, a page that needs nothing else.")
    if options.perfetto is not None:
        from gradsync.report.exporters.perfetto import write_perfetto

        _write("perfetto", options.perfetto, lambda path: write_perfetto(trace, path))
        told.append(f"Written: {options.perfetto}; open it in ui.perfetto.dev.")
    if options.tensorboard is not None:
        from gradsync.report.exporters.tensorboard import write_board

        _write("tensorboard", options.tensorboard, lambda path: write_board(trace, path))
        told.append(f"Written: {options.tensorboard}; tensorboard --logdir {options.tensorboard} shows it.")
    if options.prometheus is not None:
        from gradsync.report.exporters.prometheus import write_prometheus

        _write("prometheus", options.prometheus, lambda path: write_prometheus(trace, summary, path))
        told.append(f"Written: {options.prometheus}.")
    return told


def _write(option: str, path: Path, write: Callable[[Path], object]) -> None:
    try:
        write(path)
    except OSError as error:
        raise BadInput(f"gradsync report: --{option} {path} cannot be written: {error.strerror}") from None


def as_json(summary: Summary, name: str) -> dict[str, Any]:
    """Everything that is printed, and every number."""
    return {"command": "report", "version": VERSION, **_run(summary, name)}


def both_as_json(first: Summary, second: Summary, comparison: Comparison, names: tuple[str, str]) -> dict[str, Any]:
    """Two runs, each as it would be alone."""
    return {
        "command": "report",
        "version": VERSION,
        "verdict": comparison.verdict,
        "rows": [row._asdict() for row in comparison.rows],
        "runs": [_run(first, names[0]), _run(second, names[1])],
    }


def _run(summary: Summary, name: str) -> dict[str, Any]:
    return {
        "run": name,
        "verdict": summary.verdict,
        "numbers": summary.numbers,
        "blame": [each._asdict() for each in summary.blame],
        "links": [each._asdict() for each in summary.links],
        "errors": [asdict(each) for each in summary.errors],
        "health": [asdict(each) for each in summary.health],
        "warnings": [each._asdict() for each in summary.warnings],
        "facts": [each._asdict() for each in summary.facts],
    }
