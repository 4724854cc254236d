"""The numbers of a run that are worth a metric: families by rank, phase and kind; `prometheus` writes them down.

Labels are never parameters or steps, and no family has more than a thousand series: a metric that grows without end
is what takes a monitoring system down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median

from gradsync.report.exporters.alignment import wall
from gradsync.report.lateness import lateness
from gradsync.report.summary import Summary
from gradsync.report.table import tabulate
from gradsync.trace.lines import StepLine
from gradsync.trace.reader import RankTrace, RunTrace

LAST = 50  # steps that a gauge is the median of
MOST_SERIES = 1000
_MOST_LETTERS = 120

Row = tuple[tuple[str, ...], float]


@dataclass(frozen=True)
class Family:
    """One metric with all its series."""

    name: str
    help: str
    labels: tuple[str, ...]
    rows: list[Row]
    counts: bool = False  # only ever grows: a counter, not a gauge


def families(run: RunTrace, summary: Summary) -> Iterator[Family]:
    """Every family that this run has something to say about, each with at most `MOST_SERIES` series."""
    left_out = 0
    for family in _all(run, summary):
        left_out += max(0, len(family.rows) - MOST_SERIES)
        if family.rows:
            yield Family(family.name, family.help, family.labels, family.rows[:MOST_SERIES], family.counts)
    yield Family("gradsync_series_left_out", "Series beyond a thousand of a family.", (), [((), float(left_out))])


def _all(run: RunTrace, summary: Summary) -> Iterator[Family]:
    yield from _of_ranks(run)
    yield from _of_steps(run)
    yield from _of_lateness(run)
    yield from _of_incidents(run)
    yield from _of_summary(summary)


def _of_ranks(run: RunTrace) -> Iterator[Family]:
    labels = ("rank", "host", "source", "device", "gradsync", "torch")
    facts = {rank: trace.run for rank, trace in run.ranks.items()}
    infos: list[Row] = [
        ((str(rank), label(r.host), label(r.source), label(r.device), label(r.gradsync), label(r.torch)), 1.0)
        for rank, r in facts.items()
    ]
    yield Family("gradsync_rank_info", "Who writes a trace, and where; always 1.", labels, infos)
    yield _by_rank(
        "gradsync_world_size", "Ranks of the run.", ((rank, float(r.world_size)) for rank, r in facts.items())
    )
    ended = ((rank, float(trace.left_in_order)) for rank, trace in run.ranks.items())
    yield _by_rank("gradsync_ended", "1 once a rank has left in good order.", ended)
    steps = ((rank, float(trace.steps[-1].step)) for rank, trace in run.ranks.items() if trace.steps)
    yield _by_rank("gradsync_steps", "The number of the last step.", steps, counts=True)
    seen = ((rank, _last_seen(trace)) for rank, trace in run.ranks.items() if trace.steps)
    yield _by_rank("gradsync_last_step_timestamp_seconds", "When a rank ended its last step, since 1970.", seen)


def _of_steps(run: RunTrace) -> Iterator[Family]:
    """Medians over the last steps."""
    recent = {rank: steps for rank, trace in run.ranks.items() if (steps := _recent(trace))}
    kinds = (
        ("gradsync_step_seconds", "A step, from one synchronization's end to the next.", lambda s: s.step_s),
        ("gradsync_exposed_seconds", "Of a step, waiting with nothing to compute.", lambda s: s.exposed_s),
        ("gradsync_overhead_ratio", "The exposed part of a step.", lambda s: s.exposed_s / s.step_s),
        ("gradsync_comm_seconds", "Of a step, with a collective under way.", lambda s: s.comm_s),
        ("gradsync_payload_bytes", "Handed to collectives in a step.", lambda s: float(s.nbytes)),
        ("gradsync_raw_bytes", "The same before compression.", lambda s: float(s.raw_nbytes)),
        ("gradsync_sent_bytes", "Put on a network in a step.", lambda s: float(s.sent_nbytes)),
        ("gradsync_encode_seconds", "Of a step, compressing.", lambda s: s.encode_s),
        ("gradsync_decode_seconds", "Of a step, decompressing.", lambda s: s.decode_s),
    )
    for name, text, of in kinds:
        medians = ((rank, median(map(of, steps))) for rank, steps in recent.items())
        yield _by_rank(name, f"{text} Median of the last {LAST} steps.", medians)
    ratios = [(rank, float(s.raw_nbytes), float(s.nbytes)) for rank, steps in recent.items() for s in steps[-1:]]
    text = "Bytes before compression by bytes after it, in the last step."
    yield _by_rank("gradsync_compression_ratio", text, ((rank, raw / sent) for rank, raw, sent in ratios if sent))
    yield _phases(recent)


def _phases(recent: dict[int, list[StepLine]]) -> Family:
    rows: list[Row] = []
    for rank, steps in recent.items():
        names = dict.fromkeys(phase.name for step in steps for phase in step.phases)
        rows += [((str(rank), label(name)), median(step.seconds(name) for step in steps)) for name in names]
    text = f"Of a step, one phase. Median of the last {LAST} steps."
    return Family("gradsync_phase_seconds", text, ("rank", "phase"), _unique(rows))


def _of_lateness(run: RunTrace) -> Iterator[Family]:
    by_rank: dict[int, list[float]] = {}
    for (_, rank), late in lateness(tabulate(run, LAST)).items():
        by_rank.setdefault(rank, []).append(late.late_s)
    text = f"How much later than the others a rank was done with its own work. Median of the last {LAST} steps."
    yield _by_rank("gradsync_late_seconds", text, ((rank, median(late)) for rank, late in sorted(by_rank.items())))


def _of_incidents(run: RunTrace) -> Iterator[Family]:
    health: Counter[tuple[str, str]] = Counter()
    errors: Counter[tuple[str, str]] = Counter()
    for rank, trace in run.ranks.items():
        health.update((str(rank), label(line.what)) for line in trace.health)
        errors.update((str(rank), label(line.what)) for line in trace.errors)
    for name, text, found in (
        ("gradsync_health", "Findings about gradients, replicas and order, by the rank that wrote them.", health),
        ("gradsync_errors", "Failed synchronizations, by the rank that wrote them.", errors),
    ):
        rows: list[Row] = [(labels, float(count)) for labels, count in sorted(found.items())]
        yield Family(name, text, ("rank", "what"), rows, counts=True)


def _of_summary(summary: Summary) -> Iterator[Family]:
    numbers = summary.numbers.items()
    rows: list[Row] = [((label(name),), float(value)) for name, value in numbers if isinstance(value, int | float)]
    late: list[Row] = [((str(each.rank), label(each.phase)), each.late_s) for each in summary.blame]
    text = "By how much a rank that the others wait for is late as a rule; none: nobody is to blame."
    yield Family("gradsync_blamed_seconds", text, ("rank", "phase"), _unique(late))
    slow: list[Row] = [
        ((str(each.rank), "" if each.peer is None else str(each.peer), label(each.address)), each.rate)
        for each in summary.links
    ]
    text = "What a connection that is slower than the others gives while it is busy."
    yield Family("gradsync_slow_link_bytes_per_second", text, ("rank", "peer", "address"), _unique(slow))
    yield Family("gradsync_report", "The numbers of gradsync report --json, by name.", ("name",), _unique(rows))


def _recent(trace: RankTrace) -> list[StepLine]:
    """The last steps that count; the first one, in which buckets are laid out, only while there is no other."""
    counted = [step for step in trace.steps[-LAST:] if step.counts and step.step_s > 0]
    return counted[1:] if len(counted) > 1 and counted[0] is trace.steps[0] else counted


def _last_seen(trace: RankTrace) -> float:
    last = trace.steps[-1]
    return wall(trace, last.at + last.step_s)


def _by_rank(name: str, text: str, values: Iterable[tuple[int, float]], counts: bool = False) -> Family:
    return Family(name, text, ("rank",), [((str(rank),), value) for rank, value in values], counts)


def _unique(rows: list[Row]) -> list[Row]:
    """Two names may look alike once they are cut: the first one stays."""
    return list({labels: (labels, value) for labels, value in reversed(rows)}.values())[::-1]


def label(text: str) -> str:
    """A label that no scraper stumbles over: printable, and not long.

    >>> label("two\\nlines")
    'two�lines'
    """
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text[:_MOST_LETTERS])
