"""A run in numbers and sentences: `gradsync report` prints them, the page draws them, exporters send them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import TypeVar

from gradsync.report import facts
from gradsync.report.facts import Fact, ReportWarning
from gradsync.report.headline import headline
from gradsync.report.overhead import measure
from gradsync.report.post_mortem.failures import causes_in
from gradsync.report.post_mortem.last_seen import last_seen
from gradsync.report.rank_stats import choice_of, read_rank_stats
from gradsync.report.slow_links import SlowLink, find_slow_links, sum_links
from gradsync.report.slow_ranks import FEWEST, Blame, find_blame
from gradsync.report.table import Table, tabulate
from gradsync.report.warnings import warn
from gradsync.report.wording import clean
from gradsync.trace.lines import Error, Health, Value
from gradsync.trace.reader import RunTrace

__all__ = ["Fact", "ReportWarning", "Summary", "summarize"]

T = TypeVar("T", Health, Error)

_MOST = 100  # sentences of health, or errors


@dataclass(frozen=True)
class Summary:
    """The summary of a run; every text is free of control characters, but not yet of HTML's."""

    verdict: str
    facts: list[Fact] = field(default_factory=list)
    blame: list[Blame] = field(default_factory=list)  # the worst first
    links: list[SlowLink] = field(default_factory=list)
    health: list[Health] = field(default_factory=list)  # each once, though all ranks may have written it
    errors: list[Error] = field(default_factory=list)  # the first first
    warnings: list[ReportWarning] = field(default_factory=list)
    numbers: dict[str, Value] = field(default_factory=dict)


def summarize(run: RunTrace, last: int | None = None) -> Summary:
    """Summarize a run, of all its steps or of its last few."""
    whole, said = tabulate(run, last), read_rank_stats(run)
    table = _of_this_plan(run, whole)
    if table is whole and choice_of(run) is not None:
        said = replace(said, predicted_step_s=None)  # of a plan that hardly ran
    overhead = measure(table)
    blame = [] if overhead is None else find_blame(run, table, overhead)
    links = sum_links(run, table)
    slow = [] if overhead is None else find_slow_links(run, table, links, [each.rank for each in blame], said)
    health = _health(run)
    errors = _errors(run)
    numbers = facts.count(run, whole, overhead, said, blame, links, slow)
    return Summary(
        verdict=headline(run, overhead, blame, slow, errors),
        facts=facts.tell(run, numbers, overhead, blame, table is not whole),
        blame=blame,
        links=slow,
        health=health,
        errors=errors,
        warnings=warn(run, table, overhead, said, links),
        numbers=numbers,
    )


def _of_this_plan(run: RunTrace, table: Table) -> Table:
    """The steps since `gs.auto()` switched, if there are enough, without the one that holds the switch."""
    since = choice_of(run)
    if since is None:
        return table
    now = table.after(since)
    return now if len(now.judged()) >= FEWEST else table


def _health(run: RunTrace) -> list[Health]:
    """Return what ranks found, in order; the same words of several ranks once."""
    lines = (
        replace(line, what=clean(line.what), text=clean(line.text), parameter=line.parameter and clean(line.parameter))
        for line in _in_order(line for trace in run.ranks.values() for line in trace.health)
    )
    return list({(line.step, line.what, tuple(line.ranks), line.parameter): line for line in lines}.values())[:_MOST]


def _errors(run: RunTrace) -> list[Error]:
    """Return what ranks raised, on their own account first: the others only followed."""
    causes = causes_in({rank: trace.errors[0] for rank, trace in run.ranks.items() if trace.errors})
    seen = last_seen(run)

    def when(raised: tuple[int, Error]) -> tuple[bool, int, float]:
        (rank, line), at = raised, seen[raised[0]].failed_at
        return causes.get(rank) is not line, line.step, inf if at is None else at

    lines = sorted(((rank, line) for rank, trace in run.ranks.items() for line in trace.errors), key=when)
    return [replace(line, what=clean(line.what), text=clean(line.text)) for _, line in lines[:_MOST]]


def _in_order(lines: Iterable[T]) -> list[T]:
    return sorted(lines, key=lambda line: line.step)
