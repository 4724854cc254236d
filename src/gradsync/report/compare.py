"""Two runs side by side: which step is shorter, by how much, and where that comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gradsync.report.summary import Summary
from gradsync.report.wording import NOUNS, show_share
from gradsync.trace.lines import Value
from gradsync.units import show_count, show_nbytes, show_rate, show_seconds

_SAME = 0.03  # of a step: less is a machine's mood
_PART = 0.2  # of the difference that a cause must explain to be named

_CAUSES = (
    ("compute_s", "computing"),
    ("waiting_s", "waiting for late ranks"),
    ("network_s", "waiting for the exchange"),
)


class ComparedNumber(NamedTuple):
    """One number of both runs."""

    name: str
    first: str
    second: str
    difference: str  # of the second to the first


class Comparison(NamedTuple):
    """The comparison of two runs."""

    verdict: str
    rows: list[ComparedNumber]


def compare(first: Summary, second: Summary, names: tuple[str, str] = ("the first", "the second")) -> Comparison:
    """The second against the first."""
    a, b = first.numbers, second.numbers
    rows = [row for key, name, show, relative in _ROWS if (row := _row(a, b, key, name, show, relative)) is not None]
    return Comparison(_verdict(a, b, names), [*rows, _stragglers(first, second)])


def _number(numbers: dict[str, Value], key: str) -> float | None:
    value = numbers.get(key)
    return float(value) if isinstance(value, int | float) else None


def _verdict(a: dict[str, Value], b: dict[str, Value], names: tuple[str, str]) -> str:
    before, after = _number(a, "step_s"), _number(b, "step_s")
    if not before or not after:
        return f"They cannot be compared: {names[1] if before else names[0]} has no step that counts."
    batches = _number(a, "batches_per_step") or 1.0, _number(b, "batches_per_step") or 1.0
    if batches[0] != batches[1]:  # steps mean different things: what both have is a batch
        a, b = _per_batch(a, batches[0]), _per_batch(b, batches[1])
        before, after = before / batches[0], after / batches[1]
    what, unlike = "step" if batches[0] == batches[1] else "time per batch", _unlike(a, b)
    if abs(after / before - 1) < _SAME:
        equal = "Steps are equally long" if what == "step" else "Batches take equally long"
        return f"{equal}: {show_seconds(before)} and {show_seconds(after)} is how machines vary{unlike}."
    (short, better, best), (long, worse, _) = sorted(
        [(before, a, names[0]), (after, b, names[1])], key=lambda it: it[0]
    )
    gain = f"{show_share(1 - short / long)} shorter, {show_seconds(short)} instead of {show_seconds(long)}"
    return f"{best} is better: its {what} is {gain}{unlike}{_where(better, worse, long - short)}."


def _per_batch(numbers: dict[str, Value], batches: float) -> dict[str, Value]:
    """The numbers, with the causes of a step's length per batch."""
    return numbers | {key: (_number(numbers, key) or 0.0) / batches for key, _ in _CAUSES}


def _unlike(a: dict[str, Value], b: dict[str, Value]) -> str:
    """Say what else than synchronization differs, so that nobody takes it for the reason."""
    said = ""
    if a.get("world_size") != b.get("world_size"):
        said += f", on {a['world_size']} and {b['world_size']} ranks"
    sizes = _number(a, "num_parameters"), _number(b, "num_parameters")
    if sizes[0] and sizes[1] and sizes[0] != sizes[1]:
        said += f", with models of {show_count(int(sizes[0]))} and {show_count(int(sizes[1]))} parameters"
    return said


def _where(better: dict[str, Value], worse: dict[str, Value], gain_s: float) -> str:
    """The causes that explain a good part of the difference, the largest first; then what went the other way."""
    gains = sorted(((_number(worse, key) or 0.0) - (_number(better, key) or 0.0), name) for key, name in _CAUSES)
    less = [f"{show_seconds(gain)} less {name}" for gain, name in reversed(gains) if gain > _PART * gain_s]
    more = [f"but {show_seconds(-gain)} more {name}" for gain, name in gains if gain < -_PART * gain_s]
    return f" ({', '.join([*less, *more])})" if less else ""


def _row(
    a: dict[str, Value], b: dict[str, Value], key: str, name: str, show: Callable[[float], str], relative: bool
) -> ComparedNumber | None:
    first, second = _number(a, key), _number(b, key)
    if first is None and second is None:
        return None
    if first is None or second is None or first == second:
        difference = ""
    elif relative:
        difference = f"{100 * (second / first - 1):+.0f} %".replace("-", "−") if first else ""
    else:
        difference = f"{100 * (second - first):+.1f} points".replace("-", "−")
    return ComparedNumber(
        name, "-" if first is None else show(first), "-" if second is None else show(second), difference
    )


def _stragglers(first: Summary, second: Summary) -> ComparedNumber:
    a, b = (
        ", ".join(f"rank {each.rank} ({NOUNS[each.phase]})" for each in summary.blame) or "none"
        for summary in (first, second)
    )
    return ComparedNumber("stragglers", a, b, "")


def _plain(value: float) -> str:
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


# key, name, how to show it, and whether differences are percent of it, or percentage points
_ROWS: tuple[tuple[str, str, Callable[[float], str], bool], ...] = (
    ("world_size", "ranks", _plain, True),
    ("steps", "steps", _plain, True),
    ("batches_per_step", "batches in a step", _plain, True),
    ("step_s", "step", show_seconds, True),
    ("overhead", "overhead", show_share, False),
    ("exposed_s", "exposed", show_seconds, True),
    ("waiting_s", "  for ranks", show_seconds, True),
    ("network_s", "  for the exchange", show_seconds, True),
    ("compute_s", "compute", show_seconds, True),
    ("comm_s", "communication", show_seconds, True),
    ("overlap", "overlap", show_share, False),
    ("sent_nbytes", "sent", show_nbytes, True),
    ("bus_bandwidth", "bus bandwidth", show_rate, True),
    ("ratio", "compression ratio", _plain, True),
    ("audit_error", "error", show_share, False),
    ("staleness_max", "staleness", _plain, True),
    ("predicted_step_s", "predicted step", show_seconds, True),
    ("dropped_steps", "dropped steps", _plain, True),
)
