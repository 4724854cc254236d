"""The numbers of a report: flat for machines, and with their meaning for people.

What a report is made of, besides sentences on ranks and links.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from gradsync.report.overhead import Overhead
from gradsync.report.rank_stats import RankStats
from gradsync.report.slow_links import LinkUse, SlowLink
from gradsync.report.slow_ranks import Blame
from gradsync.report.table import Table
from gradsync.report.wording import NOUNS, exchange_in, show_share, waits_for
from gradsync.trace.lines import Value
from gradsync.trace.reader import RunTrace
from gradsync.units import show_nbytes, show_rate, show_seconds


class Fact(NamedTuple):
    """One number of the report."""

    name: str
    value: str
    meaning: str


class ReportWarning(NamedTuple):
    """Something to look at, and what to do."""

    text: str
    advice: str


_WHOLE = 1.05  # of a link's bandwidth: a little more is the error of the measurement


def count(
    run: RunTrace,
    table: Table,
    overhead: Overhead | None,
    said: RankStats,
    blame: Sequence[Blame],
    links: Sequence[LinkUse],
    slow: Sequence[SlowLink],
) -> dict[str, Value]:
    """Everything that is a number, flat; docs/report.md says what each is."""
    numbers: dict[str, Value] = {
        "world_size": run.world_size,
        "ranks": len(run.ranks),
        "steps": len(table.steps),
        "batches_per_step": _batches_per_step(run),
        "num_parameters": sum(math.prod(shape) for _, shape, _ in next(iter(run.ranks.values())).run.parameters),
        "dropped_steps": sum(any(not cell.counts for cell in table.rows[step].values()) for step in table.steps),
        "late_ranks": len(blame),
        "slow_links": len(slow),
        "retransmits": sum(link.retransmits for link in links),
        "errors": sum(len(trace.errors) for trace in run.ranks.values()),
        "health": sum(len(trace.health) for trace in run.ranks.values()),
    }
    if overhead is not None:
        numbers |= _of_steps(overhead, said)
    worst = blame[0] if blame else None
    return numbers | {
        "late_rank": None if worst is None else worst.rank,
        "late_phase": None if worst is None else worst.phase,
        "late_s": None if worst is None else worst.late_s,
        "late_share": None if worst is None else worst.share,
        "audit_error": said.audit_error,
        "audit_cosine": said.audit_cosine,
        "staleness_mean": said.staleness_mean,
        "staleness_max": said.staleness_max,
        "staleness_bound": said.staleness_bound,
        "waited_s": said.waited_s,
    }


def _batches_per_step(run: RunTrace) -> int:
    """Micro-batches that a rank computes in a step, as its plan says."""
    exchange = exchange_in(run)
    return 1 if exchange is None else exchange.window or 1


def _of_steps(overhead: Overhead, said: RankStats) -> dict[str, Value]:
    predicted, bus, link = said.predicted_step_s, overhead.bus_bandwidth, said.link_bandwidth
    use = bus / link if bus and link else None
    return {
        "step_s": overhead.step_s,
        "compute_s": overhead.own_s,
        "exposed_s": overhead.exposed_s,
        "overhead": overhead.share,
        "waiting_s": overhead.waiting_s,
        "network_s": overhead.network_s,
        "comm_s": overhead.comm_s,
        "overlap": overhead.overlap,
        "ideal_step_s": max(overhead.own_s, overhead.comm_s or 0.0),
        "nbytes": round(overhead.nbytes),
        "raw_nbytes": round(overhead.raw_nbytes),
        "sent_nbytes": round(overhead.sent_nbytes),
        "ratio": overhead.raw_nbytes / overhead.nbytes if overhead.nbytes and overhead.raw_nbytes else None,
        "encode_s": overhead.encode_s,
        "decode_s": overhead.decode_s,
        "bus_bandwidth": bus,
        "link_bandwidth": link,
        # No link gives more than it can: then the probe's number is not that of this link.
        "link_use": None if use is None or use > _WHOLE else use,
        "predicted_step_s": predicted,
        "prediction_error": overhead.step_s / predicted - 1 if predicted else None,
    }


def tell(
    run: RunTrace, numbers: dict[str, Value], overhead: Overhead | None, blame: Sequence[Blame], since_choice: bool
) -> list[Fact]:
    """The facts for people, the most telling first; what is not known is left out.

    `since_choice`: of the steps with the plan that `gs.auto()` chose last.
    """
    if overhead is None:
        return []
    facts = _of_step(run, overhead, ", since gs.auto() chose" if since_choice else "")
    if run.world_size == 1:
        return facts
    facts += [*_communication(run, numbers, overhead), *_compression(numbers, overhead), *_pace(numbers)]
    if predicted := _prediction(numbers):
        facts.append(predicted)
    ranks = ", ".join(f"rank {each.rank}" for each in blame) or "none"
    why = "; ".join(f"{NOUNS[each.phase]} {show_seconds(each.late_s)} later" for each in blame)
    return [*facts, Fact("stragglers", ranks, why or "no rank is late in half of the last steps by much")]


def _of_step(run: RunTrace, overhead: Overhead, since: str) -> list[Fact]:
    """Return how long a step is, and what of it is waiting; a rank alone waits for nobody."""
    taken = f"the middle half of {overhead.num_steps} steps, on the average{since}"
    if overhead.seldom:
        taken = f"the mean of {overhead.num_steps}; not all of them synchronize{since}"
    step = Fact("step", show_seconds(overhead.step_s), taken)
    compute = Fact("compute", show_seconds(overhead.own_s), "the step without the wait")
    if run.world_size == 1:
        return [step, compute]
    share = Fact("overhead", show_share(overhead.share), "of the step, a rank has nothing to compute and waits")
    if (whom := waits_for(run)) is not None:
        return [step, share, Fact("exposed", show_seconds(overhead.exposed_s), f"that wait, for {whom}"), compute]
    return [
        step,
        share,
        Fact("exposed", show_seconds(overhead.exposed_s), "that wait; what follows adds up to it"),
        Fact("  for ranks", show_seconds(overhead.waiting_s), "until the last rank is ready"),
        Fact("  for the exchange", show_seconds(overhead.network_s), "when every rank is ready"),
        compute,
    ]


def _of_the_link(run: RunTrace, share: Value, link: Value) -> str:
    """The fact beside what a probe found the link to give; no share of it that cannot be."""
    if not isinstance(link, float):
        return ""
    if isinstance(share, float):
        return f"; {show_share(min(share, 1.0))} of the {show_rate(link)} that the probe found"
    hosts = {trace.run.host for trace in run.ranks.values()}
    inside = 1 < len(hosts) < len(run.ranks)  # several ranks on some host
    why = "part of this stays inside of a host, or the link gives more by now" if inside else "it gives more by now"
    return f"; the probe found {show_rate(link)} between hosts: {why}"


def _communication(run: RunTrace, numbers: dict[str, Value], overhead: Overhead) -> list[Fact]:
    facts = []
    if overhead.comm_s:
        facts.append(Fact("communication", show_seconds(overhead.comm_s), "some collective is under way"))
    if overhead.overlap is not None:
        ideal = show_seconds(max(overhead.own_s, overhead.comm_s or 0.0))
        facts.append(
            Fact("overlap", show_share(overhead.overlap), f"of what can hide behind computing does; ideal step {ideal}")
        )
    if overhead.sent_nbytes:
        facts.append(Fact("sent", show_nbytes(overhead.sent_nbytes), "that a rank puts on a network in a step"))
    if (bus := overhead.bus_bandwidth) is not None:
        of = _of_the_link(run, numbers["link_use"], numbers["link_bandwidth"])
        facts.append(Fact("bus bandwidth", show_rate(bus), f"sent, per second of communication{of}"))
    return facts


def _compression(numbers: dict[str, Value], overhead: Overhead) -> list[Fact]:
    facts = []
    ratio, error = numbers["ratio"], numbers["audit_error"]
    if isinstance(ratio, float) and ratio > 1.01:
        cost = show_seconds(overhead.encode_s + overhead.decode_s)
        facts.append(Fact("compression", f"{ratio:.3g} ×", f"fewer bytes, for {cost} of encoding and decoding"))
    if isinstance(error, float):
        facts.append(Fact("error", show_share(error), "of the exact mean gradient, at the last audit"))
    return facts


def _pace(numbers: dict[str, Value]) -> list[Fact]:
    most, bound, mean = (numbers[f"staleness_{name}"] for name in ("max", "bound", "mean"))
    if most is None:
        return []
    more = f"; {mean:.2g} on the average" if isinstance(mean, float) else ""
    more += f", {bound:.0f} allowed" if isinstance(bound, float) else ""
    return [Fact("staleness", f"{most:.0f}", f"the most updates by which a gradient was late{more}")]


def _prediction(numbers: dict[str, Value]) -> Fact | None:
    """Predicted against measured, where somebody predicted."""
    predicted, error = numbers.get("predicted_step_s"), numbers.get("prediction_error")
    if not isinstance(predicted, float) or not isinstance(error, float):
        return None
    off = f"measured is {show_share(abs(error))} {'longer' if error > 0 else 'shorter'}"
    return Fact("predicted step", show_seconds(predicted), off)
