"""The first line of a report: what synchronization costs, and who or what that is."""

from __future__ import annotations

from collections.abc import Sequence

from gradsync.report.overhead import Overhead
from gradsync.report.slow_links import SlowLink
from gradsync.report.slow_ranks import Blame
from gradsync.report.wording import NOUNS, listed, over_network, points, printable, show_share, waits_for, who
from gradsync.trace.lines import Error
from gradsync.trace.reader import RunTrace
from gradsync.units import show_seconds

_LITTLE = 0.02  # of the step: nobody needs to do anything
_ENOUGH = 0.5  # of the steps of the rank that has most
_WORTH_SAYING = 0.2  # of what synchronization costs


def headline(
    run: RunTrace,
    overhead: Overhead | None,
    blame: Sequence[Blame],
    links: Sequence[SlowLink],
    errors: Sequence[Error],
) -> str:
    """One sentence; two, if the run broke."""
    cost = _no_steps(run) if overhead is None else _cost(run, overhead, blame, links)
    return f"{broke(errors[0])} {cost}" if errors else cost


def broke(error: Error) -> str:
    """Say in a sentence what ended a run."""
    named = f", which names {listed(error.ranks)}" if error.ranks else ""
    return f"The run broke in step {error.step} with {printable(error.what)}{named}."


def _no_steps(run: RunTrace) -> str:
    if any(trace.steps for trace in run.ranks.values()):
        return "No step counts yet: the first, which is always different, or dropped ones are all there is."
    wrote = "1 rank has" if len(run.ranks) == 1 else f"{len(run.ranks)} of {run.world_size} ranks have"
    return f"No step was finished: {wrote} written who they are, and nothing to measure."


def _cost(run: RunTrace, overhead: Overhead, blame: Sequence[Blame], links: Sequence[SlowLink]) -> str:
    length = show_seconds(overhead.step_s)
    if run.world_size == 1:
        return f"One rank trains alone, so nothing is synchronized; a step takes {length}."
    costs = f"Sync costs {show_share(overhead.share)} of the step"
    parts = [*_late_parts(overhead, blame), *_other_parts(run, overhead, blame, links)]
    if overhead.share < _LITTLE and not blame:
        return f"{costs} of {length}: it is not what holds training up."
    lately = [each for each in blame if each.share < _WORTH_SAYING * overhead.share]
    added = f"; lately {who(run, lately[0].rank)} is late, by {show_seconds(lately[0].late_s)}" if lately else ""
    return f"{costs}; {', '.join(_joined(parts))}{added}" if parts else f"{costs} of {length}{added}"


def _late_parts(overhead: Overhead, blame: Sequence[Blame]) -> list[tuple[float, str]]:
    told = [each for each in blame if each.share >= _WORTH_SAYING * overhead.share]
    return [(each.share, f"rank {each.rank}'s {NOUNS[each.phase]}") for each in told]


def _other_parts(
    run: RunTrace, overhead: Overhead, blame: Sequence[Blame], links: Sequence[SlowLink]
) -> list[tuple[float, str]]:
    """Return the parts that no rank is to blame for."""
    if (whom := waits_for(run)) is not None:
        return [(overhead.share, f"waiting for {whom}")]
    late = {each.rank for each in blame}
    uneven = sum(charged for rank, charged in overhead.charged_s.items() if rank not in late)
    parts = [(overhead.network_s, _network(run, overhead, links)), (uneven, "waiting for whichever rank is last")]
    return sorted(
        ((seconds / overhead.step_s, what) for seconds, what in parts if seconds > _WORTH_SAYING * overhead.exposed_s),
        reverse=True,
    )


def _network(run: RunTrace, overhead: Overhead, links: Sequence[SlowLink]) -> str:
    name = "the network" if over_network(run, overhead.sent_nbytes, overhead.nbytes) else "the exchange itself"
    if links:
        to = links[0].address if links[0].peer is None else f"rank {links[0].peer}"
        return f"{name}, where the link from rank {links[0].rank} to {to} is slow"
    if run.missing:
        return f"{name} or a rank whose file is not here"
    short = cut_short(run)
    return f"{name} or {listed(short)}, of which few steps are here" if short else name


def cut_short(run: RunTrace) -> list[int]:
    """Ranks that left so few readable steps that nobody can say how late they were."""
    counts = {rank: len(trace.steps) for rank, trace in run.ranks.items()}
    return [rank for rank, count in counts.items() if count < _ENOUGH * max(counts.values())]


def _joined(parts: Sequence[tuple[float, str]]) -> list[str]:
    """The parts in words, of which the first says what its number is of."""
    return [f"{points(share)}{'' if index else ' of it is'} {what}" for index, (share, what) in enumerate(parts)]
