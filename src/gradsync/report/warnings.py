"""The warnings that a run deserves, each with what to do about it: files, buckets, compression, paces, predictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from gradsync.report.facts import ReportWarning
from gradsync.report.overhead import Overhead
from gradsync.report.overlap_warning import warn_of_overlap
from gradsync.report.rank_stats import RankStats
from gradsync.report.rare_steps import warn_of_times
from gradsync.report.slow_links import LinkUse
from gradsync.report.slow_ranks import FEWEST
from gradsync.report.table import Table
from gradsync.report.wording import listed, printable, show_share, show_time, source_of
from gradsync.trace.flight import Moment
from gradsync.trace.reader import RunTrace
from gradsync.units import show_count, show_nbytes, show_seconds

_MATTERS = 0.05  # of the step
_TINY_NBYTES = 64 << 10
_MANY = 8
_LARGE_ERROR = 0.5
_NEAR = 0.9  # of a bound
_OFF = 0.25  # of a prediction
_LOST = 1e-3  # of segments
_SEGMENT_NBYTES = 1448


def warn(
    run: RunTrace, table: Table, overhead: Overhead | None, said: RankStats, links: Sequence[LinkUse]
) -> list[ReportWarning]:
    """Every warning of a run; what makes the report itself doubtful comes first."""
    found = [*_files(run), *_cut(run), *_ends(run)]
    if overhead is not None:
        found += [
            *_short(run, overhead), *warn_of_overlap(run, table, overhead), *_held_up(table), *_buckets(run, overhead),
            *_compression(overhead), *_prediction(overhead, said),
        ]  # fmt: skip
        found += warn_of_times(table, overhead)
    return [*found, *_audit(said), *_staleness(said), *_retransmits(links)]


# What makes the report itself doubtful


def _files(run: RunTrace) -> Iterable[ReportWarning]:
    for rank, why in list(run.refused.items())[:_MANY]:
        yield ReportWarning(
            f"The file of rank {rank} could not be read: {printable(why)}.", "Read it with the gradsync that wrote it."
        )
    if run.missing:
        files, them = ("The file of", "is not here") if len(run.missing) == 1 else ("The files of", "are not here")
        yield ReportWarning(
            f"{files} {listed(run.missing)} {them}, so nobody can say who was waited for.",
            "Copy rank-*.jsonl of all hosts into one folder, or trace into a folder that all hosts share.",
        )
    if run.earlier:
        steps, seen = run.earlier[-1]
        told = f"steps {steps[0]} to {steps[-1]}, ended" if steps else "no step, begun"
        many = len(run.earlier)
        which = "An earlier run in this folder is" if many == 1 else f"{many} earlier runs in this folder are"
        yield ReportWarning(
            f"{which} not shown ({'' if many == 1 else 'the last: '}{told} {show_time(seen)}).",
            "Trace into another folder when you start again; gradsync report BEFORE AFTER compares the two.",
        )
    below = (path for kind in ("model", "ranks") for path in run.folder.glob(f"{kind}-*/rank-*.jsonl"))
    if folders := sorted({path.parent for path in below}):
        named = ", ".join(printable(str(each)) for each in folders)
        yield ReportWarning(
            f"This is one of {len(folders) + 1} models of the run.",
            f"{'The other one has its report' if len(folders) == 1 else 'The others have their reports'} in {named}.",
        )
    torn = sum(trace.num_unreadable for trace in run.ranks.values())
    if torn:
        yield ReportWarning(
            f"{'One line' if torn == 1 else f'{show_count(torn)} lines'} could not be read, and did not count.",
            "A rank that was killed leaves one torn line; more of them mean a full disk, or another gradsync's file.",
        )


def _ends(run: RunTrace) -> Iterable[ReportWarning]:
    without = [rank for rank, trace in run.ranks.items() if trace.end is None and not trace.errors]
    if without and len(without) < len(run.ranks):
        yield ReportWarning(
            f"{listed(without).capitalize()} stopped without a last word, and others did not.",
            f"gradsync doctor {printable(str(run.folder))} says what happened first.",
        )


def _cut(run: RunTrace) -> Iterable[ReportWarning]:
    """A flight record goes on where a trace could not."""
    for rank, trace in list(run.ranks.items())[:_MANY]:
        left = any(entry.moment is Moment.LEFT for entry in trace.flight)
        if trace.end is None and not trace.errors and left:
            last = trace.steps[-1].step if trace.steps else 0
            yield ReportWarning(
                f"The trace of rank {rank} was cut short after step {last}, though the rank went on.",
                "The disk was full, or could not be written: its log has a warning that says why.",
            )


def _short(run: RunTrace, overhead: Overhead) -> Iterable[ReportWarning]:
    if overhead.num_steps < FEWEST and run.world_size > 1:
        count = "One step is" if overhead.num_steps == 1 else f"{overhead.num_steps} steps are"
        yield ReportWarning(
            f"{count} too few to call a rank late.",
            f"Let it run for {FEWEST} steps at least, better 50; the first is always left out.",
        )


# How gradients travel (what overlaps: `overlapping`)


def _held_up(table: Table) -> Iterable[ReportWarning]:
    steps = table.judged()
    names = Counter(
        name for step in steps for name in {cell.held_up_by for cell in table.rows[step].values()} if name is not None
    )
    for name, times in names.most_common(1):
        if 2 * times >= len(steps):
            yield ReportWarning(
                f"Full buckets wait for {printable(name)} in {times} of {len(steps)} steps, as its bucket comes first.",
                "A rank computes gradients in another order than rank 0 did in the first step: make the model take the "
                "same path on all ranks, or give that parameter's layer its place in the order of use.",
            )


def _buckets(run: RunTrace, overhead: Overhead) -> Iterable[ReportWarning]:
    sizes = [
        bucket.nbytes for trace in list(run.ranks.values())[:1] if trace.layouts for bucket in trace.layouts[-1].buckets
    ]
    if len(sizes) >= _MANY and median(sizes) < _TINY_NBYTES and overhead.network_s > _MATTERS * overhead.step_s:
        yield ReportWarning(
            f"{len(sizes)} buckets of {show_nbytes(median(sizes))} (median) travel in each step: each costs a latency.",
            "Raise bucket_cap_mb of DistributedDataParallel."
            if source_of(run) == "ddp"
            else "Raise bucket_bytes of gs.Plan; gradsync plan, or gs.auto(), finds the best.",
        )


def _retransmits(links: Sequence[LinkUse]) -> Iterable[ReportWarning]:
    for link in links:
        if link.retransmits > max(10, _LOST * link.nbytes / _SEGMENT_NBYTES):
            to = f"rank {link.peer}" if link.peer is not None else link.address
            yield ReportWarning(
                f"{show_count(link.retransmits)} segments from rank {link.rank} to {to} had to be sent again.",
                "Something drops packets: look at that cable, a busy switch, or unequal MTUs (gradsync doctor).",
            )


# What it does to gradients


def _compression(overhead: Overhead) -> Iterable[ReportWarning]:
    cost_s = overhead.encode_s + overhead.decode_s
    if not overhead.comm_s or not overhead.nbytes or overhead.raw_nbytes <= overhead.nbytes:
        return
    saved_s = overhead.comm_s * (overhead.raw_nbytes / overhead.nbytes - 1)
    if cost_s > saved_s and cost_s > 0.01 * overhead.step_s:
        yield ReportWarning(
            f"Compression costs more than it saves: {show_seconds(cost_s)} of encoding and decoding for about "
            f"{show_seconds(saved_s)} less on the way.",
            "This link is fast enough without: leave compression out, or take a cheaper one (docs/compression.md).",
        )


def _audit(said: RankStats) -> Iterable[ReportWarning]:
    if said.audit_error is not None and said.audit_error > _LARGE_ERROR:
        yield ReportWarning(
            f"What arrives differs from the exact mean gradient by {show_share(said.audit_error)} of it.",
            "With error feedback that is made up for later; without, take a milder compressor (docs/compression.md).",
        )


def _staleness(said: RankStats) -> Iterable[ReportWarning]:
    most, bound, mean = said.staleness_max, said.staleness_bound, said.staleness_mean
    if bound and most is not None and most >= _NEAR * bound and (mean or 0.0) >= bound / 2:
        yield ReportWarning(
            f"Gradients are up to {most:.0f} updates late, and {bound:.0f} are allowed: ranks run into the bound.",
            "One rank is much slower than the others: find out which, or allow more and lower the learning rate.",
        )


# Against what was expected


def _prediction(overhead: Overhead, said: RankStats) -> Iterable[ReportWarning]:
    predicted = said.predicted_step_s
    if predicted and abs(overhead.step_s / predicted - 1) > _OFF:
        yield ReportWarning(
            f"A step takes {show_seconds(overhead.step_s)}, and {show_seconds(predicted)} were predicted.",
            "gs.auto() compares the two every recheck_every steps, and chooses anew; a cluster that you gave it may be "
            "out of date: gradsync probe measures it.",
        )
