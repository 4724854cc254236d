"""The metrics of a run in Prometheus's text: for the node exporter's textfile collector, or for whoever serves it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gradsync.errors import GradSyncError
from gradsync.report.exporters.metrics import Family, families
from gradsync.report.summary import Summary
from gradsync.trace.reader import RunTrace

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


def exposition(run: RunTrace, summary: Summary) -> bytes:
    """All metrics of this moment, as a scraper reads them."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError:
        raise GradSyncError(
            "Prometheus metrics need the package prometheus-client: pip install 'gradsync[report]'"
        ) from None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(list(families(run, summary))))
    return bytes(generate_latest(registry))


def write_prometheus(run: RunTrace, summary: Summary, path: Path) -> None:
    """Write a file that a reader finds whole, old or new, never half; name it *.prom for the node exporter."""
    text = exposition(run, summary)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


class _Collector:
    """Families in prometheus_client's own words."""

    def __init__(self, found: list[Family]) -> None:
        self._found = found

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        for family in self._found:
            kind = CounterMetricFamily if family.counts else GaugeMetricFamily
            metric = kind(family.name, family.help, labels=family.labels)
            for labels, value in family.rows:
                metric.add_metric(labels, value)
            yield metric
