"""A report in the terminal: the verdict alone on its line, then who, how much, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gradsync.report.compare import ComparedNumber, Comparison
from gradsync.report.facts import Fact
from gradsync.report.summary import Summary

_MOST = 10  # sentences of one kind


def tell(console: Console, summary: Summary) -> None:
    """Print all of one run."""
    _verdict(console, summary.verdict)
    culprits = [(each.text, each.advice) for each in summary.blame] + [(it.text, it.advice) for it in summary.links]
    _sentences(console, "Who is to blame", culprits, "red")
    if summary.facts:
        console.print()
        console.print(_facts(summary.facts))
    _sentences(console, "What went wrong", ((f"step {each.step}: {each.text}", "") for each in summary.errors), "red")
    _sentences(console, "Health", ((f"step {each.step}: {each.text}", "") for each in summary.health), "yellow")
    _sentences(console, "Warnings", summary.warnings, "yellow")


def tell_both(console: Console, comparison: Comparison, names: tuple[str, str], verdicts: tuple[str, str]) -> None:
    """Print two runs side by side."""
    _verdict(console, comparison.verdict)
    console.print()
    for name, verdict in zip(names, verdicts, strict=True):
        console.print(Text.assemble((f"{name}: ", "bold"), verdict))
    console.print()
    console.print(_both(comparison.rows, names))


def _verdict(console: Console, text: str) -> None:
    # Alone on its line, however long: who reads it with a script takes the first line.
    console.print(text, style="bold", markup=False, soft_wrap=True)


def _facts(facts: Sequence[Fact]) -> Table:
    grid = Table(pad_edge=False, show_header=False, box=None)
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", style="bold")
    grid.add_column(style="dim")
    for fact in facts:
        grid.add_row(*map(Text, fact))
    return grid


def _both(rows: Sequence[ComparedNumber], names: tuple[str, str]) -> Table:
    grid = Table(pad_edge=False)
    grid.add_column("", no_wrap=True)
    for name in (*names, "difference"):
        grid.add_column(Text(name), justify="right")
    for row in rows:
        grid.add_row(*map(Text, row))
    return grid


def _sentences(console: Console, title: str, told: Iterable[tuple[str, str]], style: str) -> None:
    """Print the first few sentences, each with its advice."""
    sentences = list(told)
    if not sentences:
        return
    console.print(f"\n{title}", style="bold")
    for text, advice in sentences[:_MOST]:
        console.print(Text.assemble(("• ", style), text))
        if advice:
            console.print(Padding(Text(advice, style="dim"), (0, 0, 0, 2)))
    if len(sentences) > _MOST:
        console.print(f"  and {len(sentences) - _MOST} more, in --json", style="dim")
