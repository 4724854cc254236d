"""Ranks, shares and names from files, as sentences of a report say them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from gradsync.plan.pace_recipe import Exchange, exchange_of
from gradsync.plan.paces import canonical, every_step, from_canonical
from gradsync.report.lateness import COMPUTATION
from gradsync.trace.reader import RunTrace

_LONGEST = 80  # letters of a name

WHERE = {
    "input": "in its input pipeline",
    "forward": "in its forward pass",
    "backward": "in its backward pass",
    "optimizer": "in its optimizer",
    "encode": "in compressing its gradients",
    "other": "between its phases (logging, checkpoints, evaluation?)",
    COMPUTATION: "in all of its computation (a slower or shared processor?)",
}
NOUNS = {
    "input": "input",
    "forward": "forward pass",
    "backward": "backward pass",
    "optimizer": "optimizer",
    "encode": "compression",
    "other": "code between the phases",
    COMPUTATION: "computation",
}
ADVICE = {
    "input": "Give its loader more workers, prefetch, or move its data closer.",
    "forward": "Look at what its forward pass does that others do not: longer sequences, logging, evaluation.",
    "backward": "Look at what its backward pass does that others do not: longer sequences, hooks, recomputation.",
    "optimizer": "Look at what its optimizer step does that others do not: clipping, moving averages, checkpoints.",
    "encode": "Use a cheaper compressor, or give that rank as much processor as the others have.",
    "other": "Look at what it does between the steps that others do not: logging, checkpoints, evaluation.",
    COMPUTATION: "Look for other processes, fewer cores, a lower clock or a hot GPU on that host; compare batch sizes.",
}

BEFORE_FORWARD = "in its input, or what else comes between its optimizer and its forward pass"


HANDING_OVER = "between its backward and its wait, where gradients are handed over"


def where(phase: str, exact_input: bool, hands_over: bool) -> str:
    """The words for where a rank takes its time. Input that nobody timed by itself is all that comes before forward."""
    if phase == "other" and hands_over:
        return HANDING_OVER
    return BEFORE_FORWARD if phase == "input" and not exact_input else WHERE[phase]


def advice(phase: str, exact_input: bool, hands_over: bool, source: str) -> str:
    """Say what to do about it, for whoever synchronizes."""
    if phase == "other" and hands_over:
        return ADVICE[COMPUTATION]
    if phase != "input" or exact_input:
        return ADVICE[phase]
    timed = "observer.data(loader) of gs.observe" if source == "ddp" else "sync.data(loader)"
    return f"{ADVICE[phase]} Logging or validation there counts as input too: {timed} tells them apart."


def source_of(run: RunTrace) -> str:
    """Return who synchronized: gradsync, or ddp, which has knobs of other names."""
    return next(iter(run.ranks.values())).run.source


def exchange_in(run: RunTrace) -> Exchange | None:
    """Return what its plan exchanges, and when; None if the pace is none of ours: a file may say anything."""
    plan = next(iter(run.ranks.values())).run.plan or {}
    try:
        fields = dict(plan.get("pace") or canonical(every_step()))
        return exchange_of(from_canonical(fields.pop("kind"), fields))
    except (KeyError, TypeError, ValueError):
        return None


def waits_for(run: RunTrace) -> str | None:
    """Return whom a rank waits for, where that is not the last of all ranks."""
    exchange = exchange_in(run)
    return None if exchange is None else exchange.waits_for


def over_network(run: RunTrace, sent_nbytes: float, nbytes: float) -> bool:
    """Return whether the exchange goes over a network: as far as is known, else by whether there are several hosts."""
    return bool(sent_nbytes) or (not nbytes and len({trace.run.host for trace in run.ranks.values()}) > 1)


def printable(text: str) -> str:
    """A name from a file that anybody may have written, bounded and without what would move a cursor or start a line.

    >>> printable("\\x1b[31mred\\n"), len(printable(10_000 * "x"))
    ('�[31mred�', 80)
    """
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text[: _LONGEST + 1])
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"


def clean(text: str) -> str:
    """A sentence from such a file, on one line.

    >>> clean("one\\n  two\\x07")
    'one two�'
    """
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in " ".join(text.split()))


def show_time(seconds: float) -> str:
    """The time by the wall clock, in words; a file may say anything."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, ValueError, OSError):
        return "at an unknown time"


def show_share(share: float) -> str:
    """A part of the step.

    >>> [show_share(x) for x in (0, 0.0004, 0.012, 0.0999, 0.36)]
    ['0 %', '0.04 %', '1.2 %', '10 %', '36 %']
    """
    return f"{points(share)} %"


def points(share: float) -> str:
    """The share without its sign, for parts of a percentage.

    >>> points(0.142), points(0.0142)
    ('14', '1.4')
    """
    percent = 100 * share
    decimals = 0 if abs(percent) >= 9.95 or percent == 0 else 1 if abs(percent) >= 0.095 else 2
    return f"{percent:.{decimals}f}"


def who(run: RunTrace, rank: int) -> str:
    """A rank and its host, where that is known."""
    return f"rank {rank} (host {host_of(run, rank)})" if rank in run.ranks else f"rank {rank}"


def host_of(run: RunTrace, rank: int) -> str:
    return printable(run.ranks[rank].run.host) if rank in run.ranks else ""


def listed(ranks: Sequence[int]) -> str:
    """Ranks in a sentence; of many, the first few.

    >>> listed([3]), listed([0, 1, 2]), listed(range(40))
    ('rank 3', 'ranks 0, 1 and 2', 'ranks 0, 1, 2, 3, 4, 5 and 34 more')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:6]))} and {len(ranks) - 6} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
