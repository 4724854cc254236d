"""A shaped link is named; even and unsteady ones, and those that wait for a late rank, are not."""

from __future__ import annotations

import random

import pytest

from gradsync.report.slow_links import SlowLink
from gradsync.report.summary import summarize
from gradsync.trace.lines import SocketLine, SocketLines
from gradsync.trace.reader import RunTrace
from made_runs import NOISY, QUIET, made_run


def slow_links(run: RunTrace) -> list[SlowLink]:
    return summarize(run).links


def test_a_link_of_a_tenth_is_named_with_both_ends_and_both_rates() -> None:
    for seed in range(10):
        ranks = random.Random(seed).choice([2, 3, 4, 8])
        rank = random.Random(seed).randrange(ranks)
        peer = (rank + 1) % ranks
        (found,) = slow_links(made_run(ranks, 100, seed, noise=NOISY, slow_links={(rank, peer): 0.1}))
        assert (found.rank, found.peer) == (rank, peer), f"seed {seed}"
        assert found.rate < found.usual / 3
        assert f"from rank {rank} (host" in found.text
        assert f"to rank {peer} (host" in found.text


def test_no_link_of_a_clean_run_is_called_slow() -> None:
    for seed in range(15):
        assert slow_links(made_run(4, 100, seed, noise=NOISY, detailed=False)) == [], f"seed {seed}"


def test_a_link_that_is_hardly_used_is_not_judged() -> None:
    run = made_run(4, 100)
    run.ranks[0].socket_lines[0].wires.append(SocketLine(3, "10.0.0.4", 100_000, 0.2, 0.0003, 0))
    assert slow_links(run) == []


def test_links_that_were_hardly_busy_with_as_much_show_how_slow_the_other_is() -> None:
    """On a fast machine a shaped link was compared with nothing: the others had done their work in a quarter second."""
    run = made_run(3, 100, slow_links={(0, 1): 0.1})
    for rank in range(3):
        run.ranks[rank].socket_lines[:] = [
            SocketLines(
                line.step, [wire if wire.peer == 1 and rank == 0 else wire._replace(busy_s=0.01) for wire in line.wires]
            )
            for line in run.ranks[rank].socket_lines
        ]
    (found,) = slow_links(run)
    assert (found.rank, found.peer) == (0, 1)


def test_links_inside_a_host_are_no_measure_for_those_between() -> None:
    run = made_run(4, 100, hosts=2)
    for trace in run.ranks.values():
        same = {rank for rank, other in run.ranks.items() if other.run.host == trace.run.host}
        trace.socket_lines[:] = [
            SocketLines(line.step, [w._replace(busy_s=w.busy_s * (0.2 if w.peer in same else 1.5)) for w in line.wires])
            for line in trace.socket_lines
        ]
    assert slow_links(run) == []


def test_a_link_to_a_late_rank_is_not_called_slow() -> None:
    """What it does not take waits on the sender's side."""
    for seed in range(10):
        run = made_run(4, 100, seed, slow={2: {"input": 0.04}})
        run.ranks[1].socket_lines[:] = [
            SocketLines(
                line.step, [wire._replace(busy_s=wire.busy_s + 20 * 0.04) for wire in line.wires if wire.peer == 2]
            )
            for line in run.ranks[1].socket_lines
        ]
        assert slow_links(run) == []


def test_a_rank_that_is_a_little_late_does_not_make_its_link_slow() -> None:
    run = made_run(4, 100, slow={2: {"input": 0.003}})
    run.ranks[1].socket_lines[:] = [
        SocketLines(
            line.step, [wire._replace(busy_s=wire.busy_s + 20 * 0.003) for wire in line.wires if wire.peer == 2]
        )
        for line in run.ranks[1].socket_lines
    ]
    assert slow_links(run) == []


@pytest.mark.parametrize("probed", [None, 500e6])
def test_two_slow_directions_of_two_ranks_show_only_beside_a_probe(probed: float | None) -> None:
    shaped = {(0, 1): 0.1, (1, 0): 0.1}
    run = made_run(2, 100, noise=QUIET, slow_links=shaped, stats={"link_bandwidth": probed})
    found = slow_links(run)
    assert {(each.rank, each.peer) for each in found} == (set() if probed is None else {(0, 1), (1, 0)})
    assert all("the probe found 500 MB/s" in each.text for each in found)


def test_a_link_whose_other_end_is_not_known_is_named_by_its_address() -> None:
    run = made_run(4, 100, slow_links={(0, 1): 0.1})
    for trace in run.ranks.values():
        for line in trace.socket_lines:
            line.wires[:] = [wire._replace(peer=None) for wire in line.wires]
    (found,) = slow_links(run)
    assert found.address == "10.0.0.2"
    assert "10.0.0.2" in found.text


def test_retransmits_are_warned_of() -> None:
    run = made_run(4, 100)
    run.ranks[2].socket_lines[1].wires[0] = run.ranks[2].socket_lines[1].wires[0]._replace(retransmits=5000)
    assert any("sent again" in warned.text for warned in summarize(run).warnings)
    assert not any("sent again" in warned.text for warned in summarize(made_run(4, 100)).warnings)
