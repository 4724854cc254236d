"""A run for TensorBoard: a folder per rank, so that its ranks are lines of one chart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gradsync.errors import GradSyncError
from gradsync.report.exporters.alignment import wall
from gradsync.report.lateness import lateness
from gradsync.report.table import tabulate
from gradsync.trace.lines import StepLine
from gradsync.trace.reader import RunTrace


def write_board(run: RunTrace, folder: Path) -> int:
    """Scalars of every step and rank; how many there are. Then: tensorboard --logdir FOLDER."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise GradSyncError("TensorBoard files need the package tensorboard: pip install 'gradsync[report]'") from None
    late = lateness(tabulate(run))
    count = 0
    for rank, trace in run.ranks.items():
        with SummaryWriter(str(folder / f"rank-{rank}")) as writer:
            for step in trace.steps:
                found = late.get((step.step, rank))
                for name, value in scalars(step, None if found is None else found.late_s):
                    writer.add_scalar(name, value, step.step, wall(trace, step.at + step.step_s))
                    count += 1
    return count


def scalars(step: StepLine, late_s: float | None) -> Iterator[tuple[str, float]]:
    """Yield what a step has to show, by the name of its chart.

    >>> dict(scalars(StepLine(1, 0.0, 0.05, [], exposed_s=0.0125), None))["sync/overhead"]
    0.25
    """
    yield "step/ms", 1e3 * step.step_s
    for name in ("input", "forward", "backward", "optimizer"):
        if seconds := step.seconds(name):
            yield f"step/{name}_ms", 1e3 * seconds
    yield "sync/exposed_ms", 1e3 * step.exposed_s
    yield "sync/comm_ms", 1e3 * step.comm_s
    if step.step_s > 0:
        yield "sync/overhead", step.exposed_s / step.step_s
    if late_s is not None:
        yield "sync/late_ms", 1e3 * late_s
    yield "bytes/payload", float(step.nbytes)
    yield "bytes/sent", float(step.sent_nbytes)
    if step.nbytes and step.raw_nbytes:
        yield "bytes/ratio", step.raw_nbytes / step.nbytes
