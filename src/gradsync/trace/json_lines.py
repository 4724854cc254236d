"""Lines of a trace as JSON, and back: a file may hold anything, so what is read is checked."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from gradsync.trace.lines import (
    FORMAT,
    BucketLayout,
    BucketPlan,
    BucketTimes,
    ClockShift,
    Error,
    Health,
    Json,
    Line,
    PlanChoice,
    RankEnd,
    RunHeader,
    SocketLine,
    SocketLines,
    Stats,
    StepLine,
    StepPart,
    Value,
)


class Unreadable(ValueError):
    """A line that is none of ours; the sentence says why."""


def to_json(line: Line) -> str:
    """One line of text, without its end; what is as usual is left out.

    >>> to_json(ClockShift(0, 0.5, 1e-4))
    '{"kind":"clock","step":0,"offset_s":0.5,"error_s":0.0001}'
    """
    if isinstance(line, StepLine):
        return _step_to_json(line)
    row: Json = {"kind": line.kind}
    for each in fields(line):
        value = getattr(line, each.name)
        if value is not None or each.default is not None:
            row[each.name] = _tidy(value)
    return json.dumps(row, separators=(",", ":"), allow_nan=False)


def from_json(text: str) -> Line:
    """Return what `to_json` wrote; raise `Unreadable` for anything else.

    >>> from_json('{"kind":"end","step":7,"why":"detach"}')
    RankEnd(step=7, why='detach')
    """
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        raise Unreadable(f"not JSON: {text[:60]!r}") from None
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str) or row["kind"] not in _READERS:
        raise Unreadable(f"no line of a trace: {text[:60]!r}")
    try:
        return _READERS[row["kind"]](row)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise Unreadable(f"a {row['kind']} line without what it needs ({error}): {text[:60]!r}") from None


def _step_to_json(step: StepLine) -> str:
    """The one line that is written in every step: by hand, since `json` takes five times as long."""
    parts = [
        f'{{"kind":"step","step":{step.step},"at":{step.at:.6f},"step_s":{step.step_s:.6f},"phases":['
        + ",".join([f'["{name}",{start:.6f},{stop:.6f}]' for name, start, stop in step.phases])
        + f'],"exposed_s":{step.exposed_s:.6f},"comm_s":{step.comm_s:.6f},"nbytes":{step.nbytes},'
        f'"raw_nbytes":{step.raw_nbytes},"sent_nbytes":{step.sent_nbytes}'
    ]
    if step.encode_s or step.decode_s:
        parts.append(f'"encode_s":{step.encode_s:.6f},"decode_s":{step.decode_s:.6f}')
    if not step.counts:
        parts.append('"counts":false')
    if step.held_up_by is not None:
        parts.append(f'"held_up_by":{json.dumps(step.held_up_by)}')
    if step.exact_input:
        parts.append('"exact_input":true')
    if step.buckets is not None:
        parts.append(f'"buckets":[{",".join([_bucket_to_json(bucket) for bucket in step.buckets])}]')
    if step.gradients is not None:
        parts.append(f'"gradients":[{",".join([f"[{index},{at:.6f}]" for index, at in step.gradients])}]')
    if step.header is not None:
        parts.append(f'"header":[{step.header[0]:.6f},{step.header[1]:.6f}]')
    return ",".join(parts) + "}"


def _bucket_to_json(times: BucketTimes) -> str:
    known = ["null" if value is None else f"{value:.6f}" for value in times[1:7]]
    return f"[{times.bucket},{','.join(known)},{times.nbytes},{times.encode_s:.6f},{times.decode_s:.6f}]"


def _tidy(value: Any) -> Any:
    """Microseconds are enough; named tuples of plans and wires become objects; NaN is nothing."""
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    if isinstance(value, BucketPlan | SocketLine):
        return {name: _tidy(each) for name, each in value._asdict().items()}
    if isinstance(value, list | tuple):
        return [_tidy(each) for each in value]
    if isinstance(value, dict):
        return {key: _tidy(each) for key, each in value.items()}
    return value


# Reading: types are checked here once, so that whoever reads a Step need not


def _int(value: Any) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise ValueError(f"{str(value)[:20]!r} is no whole number")
    return value


def _float(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= 1e18:
        raise ValueError(f"{str(value)[:20]!r} is no number")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:20]!r} is no text")
    return value[:4096]


def _object(value: Any) -> Json:
    if not isinstance(value, dict):
        raise ValueError(f"{str(value)[:20]!r} is no object")
    return value


def _maybe(read: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else read(value)


def _phase(row: Any) -> StepPart:
    return StepPart(_text(row[0]), _float(row[1]), _float(row[2]))


def _bucket_times(row: Any) -> BucketTimes:
    ready, launched, sent, done, wait_from, wait_to = (_maybe(_float, value) for value in row[1:7])
    nbytes, encode_s, decode_s = _int(row[7]), _float(row[8]), _float(row[9])
    return BucketTimes(_int(row[0]), ready, launched, sent, done, wait_from, wait_to, nbytes, encode_s, decode_s)


def _value(value: Any) -> Value:
    return value if value is None or isinstance(value, str) else _float(value) if type(value) is float else _int(value)


def _read_run(row: Json) -> RunHeader:
    if row["format"] != FORMAT:
        raise ValueError(f"format {row['format']!r}, and this gradsync reads {FORMAT}")
    plan = _maybe(_object, row.get("plan"))
    parameters = [(_text(name), tuple(map(_int, shape)), _text(dtype)) for name, shape, dtype in row["parameters"]]
    return RunHeader(
        _int(row["rank"]), _int(row["world_size"]), _text(row["host"]), _int(row["pid"]), _float(row["started"]),
        _float(row["clock"]), _text(row["source"]), _text(row["device"]), plan, parameters,
        _text(row.get("gradsync", "")), _text(row.get("torch", "")), _text(row.get("id", "")),
        members=_maybe(_members, row.get("members")),
    )  # fmt: skip


def _members(value: Any) -> tuple[int, ...]:
    members = tuple(map(_int, value))
    if sorted({*members}) != list(members) or (members and members[0] < 0):
        raise ValueError("members are ranks, in order")
    return members


def _read_layout(row: Json) -> BucketLayout:
    buckets = [
        BucketPlan(
            _int(b["bucket"]), [_int(p) for p in b["parameters"]], _int(b["nbytes"]), _maybe(_text, b.get("compressor"))
        )
        for b in row["buckets"]
    ]
    return BucketLayout(_int(row["step"]), buckets)


def _read_step(row: Json) -> StepLine:
    header = row.get("header")
    return StepLine(
        step=_int(row["step"]),
        at=_float(row["at"]),
        step_s=_float(row["step_s"]),
        phases=[_phase(each) for each in row["phases"]],
        exposed_s=_float(row.get("exposed_s", 0.0)),
        comm_s=_float(row.get("comm_s", 0.0)),
        nbytes=_int(row.get("nbytes", 0)),
        raw_nbytes=_int(row.get("raw_nbytes", 0)),
        sent_nbytes=_int(row.get("sent_nbytes", 0)),
        encode_s=_float(row.get("encode_s", 0.0)),
        decode_s=_float(row.get("decode_s", 0.0)),
        counts=row.get("counts", True) is True,
        held_up_by=_maybe(_text, row.get("held_up_by")),
        exact_input=row.get("exact_input", False) is True,
        buckets=_maybe(lambda rows: [_bucket_times(each) for each in rows], row.get("buckets")),
        gradients=_maybe(lambda rows: [(_int(index), _float(at)) for index, at in rows], row.get("gradients")),
        header=None if header is None else (_float(header[0]), _float(header[1])),
    )


def _read_wires(row: Json) -> SocketLines:
    wires = [
        SocketLine(
            _maybe(_int, w.get("peer")), _text(w["address"]), _int(w["nbytes"]), _float(w["busy_s"]),
            _float(w["rtt_s"]), _int(w["retransmits"]),
        )
        for w in row["wires"]
    ]  # fmt: skip
    return SocketLines(_int(row["step"]), wires)


def _read_stats(row: Json) -> Stats:
    stats: Mapping[str, Any] = row["stats"]
    return Stats(_int(row["step"]), {_text(key): _value(value) for key, value in stats.items()})


def _read_choice(row: Json) -> PlanChoice:
    bandwidth = _maybe(_float, row.get("link_bandwidth"))
    return PlanChoice(_int(row["step"]), _object(row["plan"]), _float(row["predicted_step_s"]), bandwidth)


def _read_health(row: Json) -> Health:
    return Health(
        _int(row["step"]), _text(row["what"]), [_int(rank) for rank in row["ranks"]],
        _maybe(_text, row.get("parameter")), _maybe(_int, row.get("count")), _text(row["text"]),
    )  # fmt: skip


def _read_error(row: Json) -> Error:
    ranks = [_int(rank) for rank in row["ranks"]]
    return Error(_int(row["step"]), _text(row["what"]), ranks, _maybe(_int, row.get("bucket")), _text(row["text"]))


_READERS: dict[str, Callable[[Json], Line]] = {
    "run": _read_run,
    "layout": _read_layout,
    "step": _read_step,
    "clock": lambda row: ClockShift(_int(row["step"]), _float(row["offset_s"]), _float(row["error_s"])),
    "wires": _read_wires,
    "stats": _read_stats,
    "choice": _read_choice,
    "health": _read_health,
    "error": _read_error,
    "end": lambda row: RankEnd(_int(row["step"]), _text(row["why"])),
}
