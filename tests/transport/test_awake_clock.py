"""The clock of all waits counts the time that this process was awake."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import gradsync
from gradsync.transport import awake_clock as module
from gradsync.transport.awake_clock import MOST_S, AwakeClock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    times = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: times[0])
    yield times
    monkeypatch.undo()


def test_time_passes_while_somebody_looks(now: list[float]) -> None:
    clock = AwakeClock(1.5)
    for _ in range(5):
        now[0] += 0.25
        assert not clock.over()
    now[0] += 0.25
    assert clock.over()
    assert (clock.passed, clock.left()) == (1.5, 0)


def test_an_hour_asleep_counts_as_a_moment(now: list[float]) -> None:
    clock = AwakeClock(10)
    clock.look()
    now[0] += 3600
    assert clock.look() == MOST_S
    assert clock.left() == 10 - MOST_S


def test_no_wait_has_a_clock_of_its_own() -> None:
    """But in commands, which nobody stops and lets go on; that of the live page bounds nothing."""
    source = Path(gradsync.__file__).parent
    others = [path.relative_to(source) for path in source.rglob("*.py") if "time.monotonic()" in path.read_text()]
    names = {path.as_posix() for path in others if path.parts[0] != "cli"}
    assert names == {"report/live/feed.py", "transport/awake_clock.py"}
