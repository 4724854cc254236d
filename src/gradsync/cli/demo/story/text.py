"""The result in words: the table, and a few sentences on what it shows. Every word follows from the numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from gradsync.cli.bench.other_processes import disturbance
from gradsync.cli.demo.story.demo_result import DemoResult, DemoVariantResult, VariantComparison
from gradsync.cli.demo.story.train_variants import ALONE, DDP, GRADSYNC, ONE
from gradsync.cli.demo.story.weight_distance import WeightDistance

if TYPE_CHECKING:
    from gradsync.cli.demo.slow_link.link_result import LinkResult

FOOTNOTE = (
    "step ms: median (middle half); the arms run 5 steps each in turn. exposed ms: median step minus that of no sync. "
    "MB sent: by each rank in a step over the network; for DDP 2(n-1)/n of the gradients' size, as its ring sends; "
    "gradsync sends none where it adds up in shared memory. DDP: gradient_as_bucket_view=True. validation loss: "
    "rank 0's, on files held out, in nats per character."
)


def table(result: DemoResult) -> Table:
    """One line per arm."""
    grid = Table(title=_title(result), title_justify="left", title_style="bold")
    grid.add_column("arm", no_wrap=True)
    for name in ("step ms", "exposed\nms", "MB\nsent", "validation\nloss"):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("replicas")
    for arm in result.arms:
        grid.add_row(
            arm.arm,
            f"{arm.step_ms.median:.1f} ({arm.step_ms.low:.0f}-{arm.step_ms.high:.0f})",
            "-" if arm.exposed_ms is None else f"{arm.exposed_ms:.1f}",
            f"{arm.sent_mb:.2f}" if arm.sent_mb else "0",
            f"{arm.validation_loss:.4f}",
            _replicas(arm, result),
        )
    return grid


def sentences(result: DemoResult) -> list[str]:
    """Say what one sees in the table; nothing of times that others have spoiled."""
    times = [on_others(result)] if result.disturbed else [_on_speed(result), _on_ranks(result)]
    return [_on_learning(result), _on_drift(result), _on_equality(result), *times]


def _title(result: DemoResult) -> str:
    each = result.threads_per_rank
    together = f"{ONE} with {show_threads(result.ranks * each)}"
    return f"{result.steps} steps: {together}, or {result.ranks} ranks with {show_threads(each)} each"


def show_threads(count: int) -> str:
    """Return a count of threads in words."""
    return "1 thread" if count == 1 else f"{count} threads"


def _replicas(arm: DemoVariantResult, result: DemoResult) -> str:
    if arm.replicas is None:
        return "only one"
    if not arm.replicas.identical:
        return f"drifted: max |Δ| = {arm.replicas.max_abs:.2g}, {_percent(arm.replicas)} of the weight norm"
    if arm.arm != GRADSYNC:
        return "identical"
    if result.gradsync_from_ddp.identical:
        return "identical, = DDP to the bit"
    return f"identical, {result.gradsync_from_ddp.relative:.1e} from DDP"


def _on_learning(result: DemoResult) -> str:
    before, after = result.loss_before, result.arm(GRADSYNC).validation_loss
    did = "fell" if after < before else "did not fall: it went"
    return f"With gradsync the validation loss {did} from {before:.2f} to {after:.2f} in {result.steps} steps."


def _on_drift(result: DemoResult) -> str:
    alone, synced = result.arm(ALONE), result.arm(GRADSYNC)
    assert alone.replicas is not None
    if alone.replicas.identical:
        return "Without sync the replicas stayed identical, which nobody would expect: please report this."
    apart = f"Without sync the {result.ranks} replicas became different models, {_percent(alone.replicas)} apart"
    if alone.validation_loss > synced.validation_loss:
        return f"{apart}, and each learned from its own share only: loss {alone.validation_loss:.2f}."
    return f"{apart}; in so few steps that did not cost rank 0 any loss ({alone.validation_loss:.2f})."


def _on_equality(result: DemoResult) -> str:
    drifted = [name for name in (DDP, GRADSYNC) if not _identical(result.arm(name))]
    if drifted:
        return f"The replicas of {' and '.join(drifted)} differ, which they never should: please report this."
    if result.gradsync_from_ddp.identical:
        return "DDP and gradsync kept them identical, and both trained the very same weights, to the last bit."
    return (
        "DDP and gradsync kept them identical; between the two the weights differ by "
        f"{result.gradsync_from_ddp.relative:.1e} of their norm, since a sum of {result.ranks} rounded numbers "
        "depends on their order."
    )


def on_others(result: DemoResult | LinkResult) -> str:
    """Say what others' work has spoiled."""
    return (
        f"{disturbance(result.busy_cores_of_others, result.cores)}: the step times above prove nothing. "
        "Run it again when the machine is idle."
    )


def _on_speed(result: DemoResult) -> str:
    compared = result.gradsync_over_ddp
    verdict = _verdict(compared, "slower", "faster", "no clear difference")
    waited = f"By its own count it waited {result.gradsync_waited_ms:.1f} ms of a step with nothing to compute"
    return f"A gradsync step took {_times(compared, 'one of DDP')}: {verdict}. {waited}."


def _on_ranks(result: DemoResult) -> str:
    compared = result.one_process_over_gradsync
    verdict = _verdict(compared, "ranks pay off here", "ranks do not pay off here", "no clear difference")
    ranks = f"{result.ranks} ranks with gradsync"
    return f"For the same batch one process with all threads took {_times(compared, ranks)}: {verdict}."


def _times(compared: VariantComparison, other: str) -> str:
    count = f"longer in {compared.slower_rounds} of {compared.rounds} rounds"
    return f"{compared.ratio.median:.2f} times as long as {other} ({count})"


def _verdict(compared: VariantComparison, slower: str, faster: str, neither: str) -> str:
    if not compared.clear:
        return neither
    return slower if compared.ratio.median > 1 else faster


def _identical(arm: DemoVariantResult) -> bool:
    return arm.replicas is not None and arm.replicas.identical


def _percent(distance: WeightDistance) -> str:
    return f"{100 * distance.relative:.2g}\N{NO-BREAK SPACE}%"
