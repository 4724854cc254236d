"""A warning where communication does not hide behind backward: why, as far as the trace shows, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from gradsync.report.facts import ReportWarning
from gradsync.report.overhead import Overhead
from gradsync.report.table import Table
from gradsync.report.wording import exchange_in, source_of
from gradsync.trace.lines import StepLine
from gradsync.trace.reader import RunTrace
from gradsync.units import show_seconds

_HIDDEN = 0.1  # less of what could be hidden: nothing overlaps
_MATTERS = 0.05  # of the step
_EARLY = 0.9  # of backward: what leaves before could hide
_RECENT = 20  # detailed steps of a rank that are looked at


def warn_of_overlap(run: RunTrace, table: Table, overhead: Overhead) -> Iterable[ReportWarning]:
    """Warn if hardly anything is hidden that could be."""
    hidden, comm_s = overhead.overlap, overhead.comm_s
    if hidden is None or comm_s is None or hidden >= _HIDDEN:
        return
    exchange = exchange_in(run)
    if exchange is None or exchange.follows_steps:
        return  # what it exchanges does not come with backward
    if min(comm_s, overhead.network_s) < _MATTERS * overhead.step_s:
        return
    told, of_ddp = show_seconds(comm_s), source_of(run) == "ddp"
    if _asked_for_none(run):
        said = f'Nothing overlaps, as overlap="none" asks: {told} of communication begin when backward is over.'
        yield ReportWarning(said, 'With gs.Plan(overlap="backward") buckets leave during backward.')
    elif _num_buckets(run) == 1:
        yield ReportWarning(
            f"Nothing overlaps: {told} of communication begin when backward is over.",
            f"All gradients travel in one bucket{_smaller_buckets(run, of_ddp)}",
        )
    elif _leave_early(table):
        yield ReportWarning(
            f"Hardly anything overlaps: buckets leave during backward, but of {told} on the way most comes after it.",
            "Where processors compute, communication needs some of them too: a core left free for it helps. Else the "
            "link is slower than backward fills buckets.",
        )
    else:
        advice = (
            "If the module was compiled before DDP wrapped it, compile the wrapped one instead."
            if of_ddp
            else "If the whole model is under torch.compile, its gradients all come at the end: compile its blocks "
            "instead."
        )
        yield ReportWarning(f"Nothing overlaps: {told} of communication begin when backward is over.", advice)


def _smaller_buckets(run: RunTrace, of_ddp: bool) -> str:
    """Say how to have smaller buckets; gs.auto() has looked at that."""
    if any(trace.choices for trace in run.ranks.values()):
        return ", which gs.auto() found the fastest: it prices smaller ones too."
    knob = "bucket_cap_mb of DistributedDataParallel" if of_ddp else "bucket_bytes of gs.Plan"
    return f": lower {knob}, so that the first can leave during backward."


def _asked_for_none(run: RunTrace) -> bool:
    """Return whether the plan that runs now asks for no overlap."""
    first = next(iter(run.ranks.values()))
    plan = first.choices[-1].plan if first.choices else first.run.plan or {}
    return plan.get("overlap") == "none"


def _num_buckets(run: RunTrace) -> int | None:
    counts = [len(trace.layouts[-1].buckets) for trace in run.ranks.values() if trace.layouts]
    return max(counts, default=None)


def _leave_early(table: Table) -> bool:
    """Return whether at least half of the buckets are under way well before backward ends."""
    shares = []
    for rank in table.ranks:
        cells = [step for step in table.column(rank) if step.buckets]
        shares += [_share_early(step) for step in cells[-_RECENT:]]
    return bool(shares) and median(shares) >= 0.5


def _share_early(step: StepLine) -> float:
    ends = [phase.start + _EARLY * phase.seconds for phase in step.phases if phase.name == "backward"]
    launched = [bucket.launched for bucket in step.buckets or () if bucket.launched is not None]
    return sum(at < ends[-1] for at in launched) / len(launched) if ends and launched else 0.0
