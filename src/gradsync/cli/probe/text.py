"""The findings of a probe, as tables, sentences and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from gradsync.cluster import Cluster, Link
from gradsync.probe.fit import Fit, FittedPoint
from gradsync.probe.measure import ProbeFindings
from gradsync.units import show_bits, show_nbytes, show_rate, show_seconds

_TIERS = {
    "across": "between hosts",
    "inside": "inside a host, by the process group",
    "memory": "inside a host, in shared memory",
}
_GOOD, _FAIR = 0.05, 0.15
_NBYTES = 1e6  # codecs are shown by what they do with so much

FOOTNOTE = (
    "message: what one rank sends in one round of an all-reduce. model: latency + bytes / bandwidth, as the planner "
    "reckons. *: kept back from the fit, to see how well the rest foretells it."
)


def tables(findings: ProbeFindings) -> list[Table]:
    """A table for each tier, and one for what computes."""
    return [*(_tier(name, fit) for name, fit in findings.tiers.items()), _codecs(findings.cluster)]


def sentences(findings: ProbeFindings, path: Path) -> list[str]:
    """Say how well the links fit, what looked wrong, and what to do now."""
    device = findings.cluster.device
    return [
        *(_link(name, fit.link) for name, fit in findings.tiers.items()),
        f"Each rank has {device.cores:.2f} cores to itself when all are busy; equal computations vary by "
        f"{100 * device.jitter:.1f} %; a copy moves {show_rate(device.memory_bandwidth)}; starting and ending an "
        f"all-reduce takes {show_seconds(device.call_s)}.",
        _verdict(findings),
        *(f"LOOK AT THIS: {warning}." for warning in findings.warnings),
        f"Written to {path}. Now: gradsync plan --cluster {path} --params 1e9 --tokens 8192 (your model's numbers).",
    ]


def as_json(findings: ProbeFindings, path: Path) -> dict[str, Any]:
    """The findings for machines."""
    return {
        "command": "probe",
        "file": str(path),
        "cluster": findings.cluster.canonical(),
        "tiers": {name: _tier_as_json(fit) for name, fit in findings.tiers.items()},
        "median_error": findings.median_error,
        "worst_error": findings.worst_error,
        "warnings": list(findings.warnings),
    }


def _link(name: str, link: Link) -> str:
    return (
        f"{name}: latency {show_seconds(link.latency_s)}, large messages {show_bits(link.bandwidth)} = "
        f"{show_rate(link.bandwidth)}; keeps {100 * link.load:.0f} % of a core busy meanwhile."
    )


def _tier(name: str, fit: Fit) -> Table:
    table = Table(title=f"{name}: {_TIERS[name]}", title_justify="left", title_style="bold")
    for column in ("message", "time", "bandwidth", "model", "model is off by"):
        table.add_column(column, justify="right", no_wrap=True)
    for point in fit.points:
        table.add_row(*_row(point))
    return table


def _row(point: FittedPoint) -> list[str]:
    return [
        show_nbytes(point.nbytes) + ("*" if point.checks else " "),
        show_seconds(point.seconds),
        show_rate(point.nbytes / point.seconds),
        show_seconds(point.fitted_s),
        f"{100 * point.error:+.0f} %",
    ]


def _codecs(cluster: Cluster) -> Table:
    table = Table(
        title=f"compressors, per {show_nbytes(_NBYTES)} of gradients", title_justify="left", title_style="bold"
    )
    table.add_column("compressor", no_wrap=True)
    for column in ("encode", "between rounds", "decode"):
        table.add_column(column, justify="right", no_wrap=True)
    for speed in cluster.device.codecs:
        stages = (speed.encode_s, speed.middle_s, speed.decode_s)
        table.add_row(speed.kind, *(show_seconds(_NBYTES * each) if each else "-" for each in stages))
    return table


def _verdict(findings: ProbeFindings) -> str:
    middle, worst = findings.median_error, findings.worst_error
    if not any(point.checks for fit in findings.tiers.values() for point in fit.points):
        return "Brief: no size was kept back, so it is not known how well the model fits; leave --brief out to see."
    how = "well" if middle <= _GOOD else "fairly" if middle <= _FAIR else "BADLY: measure again when nothing else runs"
    return (
        f"At sizes kept back the model is off by {100 * middle:.0f} % in the middle and {100 * worst:.0f} % at worst: "
        f"it fits {how}."
    )


def _tier_as_json(fit: Fit) -> dict[str, Any]:
    return {
        "median_error": fit.median_error,
        "worst_error": fit.worst_error,
        "points": [{**point._asdict(), "error": point.error} for point in fit.points],
    }
