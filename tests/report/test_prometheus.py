"""Prometheus's own parser reads back what was written, and hostile names or many ranks do no harm."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from statistics import median

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gradsync.errors import GradSyncError
from gradsync.report.exporters.metrics import MOST_SERIES
from gradsync.report.exporters.prometheus import exposition, write_prometheus
from gradsync.report.summary import Summary, summarize
from gradsync.trace.lines import Error, Health
from gradsync.trace.reader import RunTrace
from made_runs import made_run

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]
NAN = Health(3, "nonfinite", [1], "layers.0.weight", 2, "rank 1 has 2 NaN")


def parsed(text: bytes) -> Series:
    found: Series = {}
    for family in text_string_to_metric_families(text.decode()):
        assert family.name.startswith("gradsync_")
        assert family.documentation.endswith(".")
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found
            found[key] = sample.value
    return found


def value(found: Series, metric: str, /, **labels: str) -> float:
    return found[metric, frozenset(labels.items())]


def read_back(run: RunTrace) -> Series:
    return parsed(exposition(run, summarize(run)))


def test_medians_of_every_rank_are_read_back() -> None:
    run = made_run(ranks=3, steps=30, ratio=4.0, encode_s=0.001)
    found = read_back(run)
    for rank, trace in run.ranks.items():
        steps = trace.steps[1:]
        assert value(found, "gradsync_steps_total", rank=str(rank)) == 30
        assert value(found, "gradsync_step_seconds", rank=str(rank)) == median(s.step_s for s in steps)
        assert value(found, "gradsync_exposed_seconds", rank=str(rank)) == median(s.exposed_s for s in steps)
        forward = median(s.seconds("forward") for s in steps)
        assert value(found, "gradsync_phase_seconds", rank=str(rank), phase="forward") == forward
        assert value(found, "gradsync_compression_ratio", rank=str(rank)) == 4
        assert value(found, "gradsync_ended", rank=str(rank)) == 1
    last = run.ranks[0].steps[-1]
    seen = 1763300000.0 + last.at + last.step_s - 1000.0
    assert value(found, "gradsync_last_step_timestamp_seconds", rank="0") == pytest.approx(seen)
    assert value(found, "gradsync_series_left_out") == 0


def test_the_late_rank_is_the_late_one() -> None:
    run = made_run(ranks=3, steps=60, slow={2: {"input": 0.03}})
    found = read_back(run)
    assert value(found, "gradsync_late_seconds", rank="2") == pytest.approx(0.03, rel=0.2)
    assert value(found, "gradsync_late_seconds", rank="0") < 0.003
    assert value(found, "gradsync_blamed_seconds", rank="2", phase="input") == pytest.approx(0.03, rel=0.2)


def test_incidents_are_counted() -> None:
    lost = Error(9, "PeerLost", [1], 0, "rank 1 died")
    found = read_back(made_run(ranks=2, steps=9, health=(NAN, NAN), errors={0: lost}))
    assert value(found, "gradsync_health_total", rank="1", what="nonfinite") == 2
    assert value(found, "gradsync_errors_total", rank="0", what="PeerLost") == 1
    assert value(found, "gradsync_ended", rank="0") == 0


def test_numbers_of_the_report_are_there_but_not_its_words() -> None:
    run = made_run(ranks=2, steps=4)
    found = parsed(exposition(run, Summary("fine", numbers={"overhead": 0.25, "source": "gradsync", "ratio": None})))
    assert value(found, "gradsync_report", name="overhead") == 0.25
    assert sum(name == "gradsync_report" for name, _ in found) == 1


HOSTILE = 'a"b\\c\nd\re\x1b[31m\u202e\ud800{}' + 4000 * "x"


def test_hostile_labels_are_only_labels() -> None:
    bad = Health(1, HOSTILE, [0], HOSTILE, 1, HOSTILE)
    found = read_back(made_run(ranks=1, steps=3, names=(HOSTILE,), health=(bad,)))
    [info] = [dict(labels) for name, labels in found if name == "gradsync_rank_info"]
    assert info["host"].startswith('a"b\\c')
    assert info["host"].isprintable()
    assert len(info["host"]) <= 120


def test_no_family_grows_without_end() -> None:
    run = made_run(ranks=1, steps=3)
    run.ranks[0].health = [Health(1, f"kind {i}", [0], None, None, "") for i in range(MOST_SERIES + 50)]
    found = parsed(exposition(run, Summary("")))
    assert sum(name == "gradsync_health_total" for name, _ in found) == MOST_SERIES
    assert value(found, "gradsync_series_left_out") == 50


def test_names_that_look_alike_once_cut_are_one_series() -> None:
    run = made_run(ranks=1, steps=3)
    run.ranks[0].health = [Health(1, 200 * "x" + str(i), [0], None, None, "") for i in range(3)]
    parsed(exposition(run, Summary("")))  # a doubled series would fail


def test_a_run_without_steps_has_its_ranks() -> None:
    found = read_back(made_run(ranks=2, steps=0))
    assert value(found, "gradsync_world_size", rank="1") == 2


def test_the_file_is_replaced_whole(tmp_path: Path) -> None:
    run = made_run(ranks=2, steps=4)
    path = tmp_path / "gradsync.prom"
    path.write_text("old")
    before = os.stat(path).st_ino
    write_prometheus(run, summarize(run), path)
    assert path.read_bytes() == exposition(run, summarize(run))
    assert path.stat().st_ino != before
    assert list(tmp_path.iterdir()) == [path]


def test_without_the_package_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(GradSyncError, match=r"pip install 'gradsync\[report\]'"):
        exposition(made_run(ranks=1, steps=1), Summary(""))
