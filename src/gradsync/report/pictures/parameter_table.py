"""Bytes and compression by parameter: a table with a bar each, the largest first, the rest in one line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradsync import svg
from gradsync.report.pictures.escape import name, shown
from gradsync.trace.lines import BucketPlan
from gradsync.trace.reader import RankTrace, RunTrace
from gradsync.units import show_nbytes

_MOST_ROWS = 40
_BAR = 160  # px

_ITEM_NBYTES = {
    "float64": 8, "double": 8, "float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2, "complex64": 8,
    "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1,
}  # fmt: skip


@dataclass(frozen=True)
class ParameterBytes:
    """A parameter, or several."""

    name: str
    shape: tuple[int, ...]
    nbytes: int  # of its gradient
    sent: float | None  # of these, as handed to a collective; None where not known
    compressor: str | None = None


def weights(run: RunTrace) -> list[ParameterBytes]:
    """All parameters, the largest first; a bucket's compression is taken to be that of each parameter in it."""
    trace = _most_telling(run)
    buckets = {index: bucket for bucket in _layout(trace) for index in bucket.parameters}
    ratios = _payload_shares(trace)
    found = []
    for index, (label, shape, dtype) in enumerate(trace.run.parameters):
        nbytes = max(0, math.prod(shape)) * _ITEM_NBYTES.get(dtype.removeprefix("torch."), 4)
        bucket = buckets.get(index)
        share = None if bucket is None else ratios.get(bucket.bucket)
        sent = None if share is None else share * nbytes
        found.append(ParameterBytes(label, shape, nbytes, sent, bucket.compressor if bucket is not None else None))
    return sorted(found, key=lambda weight: -weight.nbytes)


def draw_parameters(run: RunTrace) -> str:
    """The table with its caption; empty if no rank named its parameters."""
    every = weights(run)
    if not every or not (total := sum(weight.nbytes for weight in every)):
        return ""
    top, rest = every[:_MOST_ROWS], every[_MOST_ROWS:]
    rows = [row for weight in top for row in _row(weight, name(weight.name), top[0].nbytes)]
    if rest:
        together = ParameterBytes("", (), sum(weight.nbytes for weight in rest), _sum([weight.sent for weight in rest]))
        rows += _row(together, f"{len(rest):,} smaller ones together", max(top[0].nbytes, together.nbytes))
    sent = _sum([weight.sent for weight in every])
    said = f"{len(every):,} parameters, {show_nbytes(total)} of gradients per step"
    if sent and sent < total:
        said += f", {show_nbytes(sent)} as handed to collectives ({total / sent:.3g} times less)"
    head = "<tr><th>parameter</th><th>gradient</th><th>bytes</th><th>sent as</th><th>ratio</th></tr>"
    return (
        f'<div class="wide" tabindex="0"><table class="parameters"><thead>{head}</thead><tbody>{"".join(rows)}</tbody>'
        f"</table></div><p>{said}. A ratio is that of the parameter's bucket.</p>"
    )


def _most_telling(run: RunTrace) -> RankTrace:
    """The rank that says most about buckets: all say the same, if all wrote."""
    return max(run.ranks.values(), key=lambda trace: (bool(trace.layouts), len(trace.run.parameters)))


def _layout(trace: RankTrace) -> Sequence[BucketPlan]:
    return trace.layouts[-1].buckets if trace.layouts else ()


def _payload_shares(trace: RankTrace) -> dict[int, float]:
    """Return each bucket's payload as a share of what it holds, from the last step that tells, in this layout."""
    held = {bucket.bucket: bucket.nbytes for bucket in _layout(trace)}
    since = trace.layouts[-1].step if trace.layouts else 0
    for step in reversed(trace.steps):
        if step.step < since:
            break
        if step.buckets:
            return {
                each.bucket: min(1.0, each.nbytes / held[each.bucket])
                for each in step.buckets
                if held.get(each.bucket, 0) > 0 and each.nbytes > 0
            }
    return {}


def _row(weight: ParameterBytes, label: str, largest: int) -> Iterator[str]:
    sent = weight.sent
    ratio = f"{weight.nbytes / sent:.3g}×" if sent else "–"
    shape = "×".join(map(str, weight.shape[:8]))
    small = f"<small>{shown(shape, 40)}</small>" if shape else ""
    yield f"<tr><td>{label}{small}</td><td>{_bar(weight, largest)}</td><td>{show_nbytes(weight.nbytes)}</td>"
    told = "–" if sent is None else show_nbytes(sent)
    kind = f"<small>{shown(weight.compressor, 30)}</small>" if weight.compressor else ""
    yield f"<td>{told}{kind}</td><td>{ratio}</td></tr>"


def _bar(weight: ParameterBytes, largest: int) -> str:
    """Pale: the gradient; strong: what of it was sent."""
    width = max(1.0, _BAR * weight.nbytes / largest)
    bars = [svg.rect("raw", 0, 0, width, 12)]
    if weight.sent is not None:
        bars.append(svg.rect("wire", 0, 0, width * weight.sent / weight.nbytes if weight.nbytes else 0.0, 12))
    return svg.symbol("bar", _BAR, 12, *bars)


def _sum(parts: Sequence[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None
