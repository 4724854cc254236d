"""A network that stands still between hosts: nobody is dead for it, and who waits says what is known."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from netlab.fixture import MakeLab
from netlab.lab import Lab
from netlab.stall_plays import train_through
from netlab.wiring import turn_link

DEAD_AFTER = 1.5


def play(made: Lab, folder: Path, timeout: float, stall: Callable[[], None]) -> list[Any]:
    """What became of each rank; `stall` is called when all are in the middle of a step, and ranks go on then."""

    def act() -> None:
        deadline = time.monotonic() + 60
        while not (folder / "ready").exists():
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)
        stall()

    thread = threading.Thread(target=act)
    thread.start()
    guard = {"timeout": timeout, "dead_after": DEAD_AFTER}
    try:
        return made.spawn(train_through, 1, str(folder), guard, timeout=60)
    finally:
        thread.join()


@pytest.mark.parametrize("hosts", [2, 3])
def test_a_stall_shorter_than_the_timeout_is_ridden_out(lab: MakeLab, tmp_path: Path, hosts: int) -> None:
    made = lab(hosts=hosts)

    def stall() -> None:
        for init in made.inits:
            turn_link(init, on=False)
        (tmp_path / "stalled").touch()
        threading.Event().wait(3 * DEAD_AFTER)  # how long it stands still is what this is about
        for init in made.inits:
            turn_link(init, on=True)

    assert play(made, tmp_path, 40.0, stall) == [["", [], ""]] * hosts


@pytest.mark.parametrize("hosts", [2, 3])
def test_a_stall_that_does_not_end_is_a_time_out_that_blames_nobody(lab: MakeLab, tmp_path: Path, hosts: int) -> None:
    made = lab(hosts=hosts)

    def stall() -> None:
        for init in made.inits:
            turn_link(init, on=False)
        (tmp_path / "stalled").touch()

    for rank, (kind, ranks, text) in enumerate(play(made, tmp_path, 5.0, stall)):
        others = [other for other in range(hosts) if other != rank]
        assert (kind, ranks) == ("SyncTimeout", []), text
        named = f"rank {others[0]}" if hosts == 2 else f"ranks {others[0]} and {others[1]}"
        assert f"nothing was heard of {named} for" in text
        assert "the network stands still, or a host has no power" in text


def test_one_host_of_three_that_is_cut_off_is_dead_for_the_others(lab: MakeLab, tmp_path: Path) -> None:
    made = lab(hosts=3)

    def stall() -> None:
        turn_link(made.inits[1], on=False)
        (tmp_path / "stalled").touch()

    first, cut_off, last = play(made, tmp_path, 8.0, stall)
    assert (first[0], first[1]) == (last[0], last[1]) == ("PeerLost", [1])
    assert "rank 1 gives no sign of life" in first[2]
    assert cut_off[0] == "SyncTimeout"
