"""A report's verdict and numbers, of whole runs and of what a crash or a hostile hand left of them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from gradsync.report.summary import Summary, summarize
from gradsync.trace.flight import FlightEntry, Moment
from gradsync.trace.lines import Error, Health, PlanChoice, StepPart
from gradsync.trace.reader import RunTrace, read_run
from made_runs import NOISY, QUIET, made_run, write_run

LOST = Error(14, "PeerLost", [1], 0, "rank 1 is gone\nfor good")


def texts(summary: Summary) -> list[str]:
    said = [summary.verdict, *(part for fact in summary.facts for part in fact)]
    said += [part for warned in summary.warnings for part in warned]
    said += [each.text for each in (*summary.blame, *summary.links, *summary.errors, *summary.health)]
    return said


def test_a_late_input_is_the_verdict() -> None:
    verdict = summarize(made_run(4, 100, slow={3: {"input": 0.038}})).verdict
    assert verdict.startswith("Sync costs 3")
    assert "of it is rank 3's input" in verdict


def test_a_slow_processor_is_the_verdict() -> None:
    assert "of it is rank 1's computation" in summarize(made_run(4, 100, noise=NOISY, times={1: 2.0})).verdict


def test_a_slow_link_is_the_verdict() -> None:
    verdict = summarize(made_run(4, 100, slow_links={(0, 1): 0.1})).verdict
    assert "the network, where the link from rank 0 to rank 1 is slow" in verdict


def test_two_late_ranks_are_both_in_the_verdict() -> None:
    verdict = summarize(made_run(4, 100, slow={1: {"input": 0.05}, 3: {"optimizer": 0.08}})).verdict
    assert "of it is rank 3's optimizer" in verdict
    assert "rank 1's input" in verdict


def test_little_is_called_little() -> None:
    verdict = summarize(made_run(4, 100, ratio=100.0, noise=QUIET.__class__())).verdict
    assert "it is not what holds training up" in verdict


def test_a_rank_that_became_late_only_now_is_named_all_the_same() -> None:
    run, late = made_run(4, 600, detailed=False), made_run(4, 600, slow={2: {"input": 0.05}}, detailed=False)
    for rank in range(4):
        run.ranks[rank].steps[-60:] = late.ranks[rank].steps[-60:]
    assert "lately rank 2 (host b) is late" in summarize(run).verdict
    assert "of it is rank 2's input" in summarize(run, last=60).verdict


def test_what_broke_a_run_comes_first() -> None:
    summary = summarize(made_run(2, 30, errors={0: LOST}, killed={1: 14}))
    assert summary.verdict.startswith("The run broke in step 14 with PeerLost, which names rank 1.")
    assert summary.errors[0].text == "rank 1 is gone for good"


def test_the_same_finding_of_all_ranks_is_told_once() -> None:
    found = Health(7, "nonfinite", [2], "w", 3, "rank 2 has 3 NaN in w")
    assert summarize(made_run(4, 30, health=(found,))).health == [found]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("steps", [0, 1, 2, 12])
@pytest.mark.parametrize("source", ["gradsync", "ddp"])
@pytest.mark.parametrize("kept", [1, 2, 4])
def test_whatever_is_there_gives_a_sentence(ranks: int, steps: int, source: str, kept: int) -> None:
    run = made_run(ranks, steps, source=source)
    for rank in range(kept, ranks):
        del run.ranks[rank]
    summary = summarize(run)
    assert summary.verdict.endswith((".", "up", "network", "itself", "here", "last")) or "of it is" in summary.verdict
    assert all(text.isprintable() for text in texts(summary))
    json.dumps(summary.numbers, allow_nan=False)


def test_a_rank_of_which_little_is_here_shares_the_suspicion() -> None:
    run = made_run(4, 60, slow={3: {"input": 0.05}})
    del run.ranks[3].steps[3:]
    assert "the network or rank 3, of which few steps are here" in summarize(run).verdict


def test_absent_ranks_are_named_and_share_the_suspicion() -> None:
    run = made_run(4, 60, slow={3: {"input": 0.05}})
    del run.ranks[3]
    summary = summarize(run)
    assert "the network or a rank whose file is not here" in summary.verdict
    assert summary.warnings[0].text.startswith("The file of rank 3 is not here")


def test_names_from_files_cannot_move_the_cursor_anywhere() -> None:
    evil = "\x1b[2J\r\n\u202eevil"
    health = Health(3, evil, [0], evil, 1, evil)
    errors = {0: Error(60, evil, [1], 0, evil)}
    run = made_run(2, 60, slow={1: {"input": 0.05}}, names=(evil, evil), health=(health,), errors=errors)
    for trace in run.ranks.values():
        trace.run.parameters[:] = [(evil, (1,), evil)]
    assert all(text.isprintable() for text in texts(summarize(run)))


def test_random_nonsense_in_steps_never_ends_in_a_traceback() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        run = made_run(rng.choice([1, 2, 3]), 12, seed)
        for trace in run.ranks.values():
            for index, step in enumerate(trace.steps):
                if rng.random() < 0.5:
                    wild = [rng.choice([0.0, -1.0, 1e18, -1e18, 1e-9]) for _ in range(6)]
                    trace.steps[index] = type(step)(
                        step.step, wild[0], wild[1], [StepPart(rng.choice(["wait", "input", "x"]), wild[2], wild[3])],
                        wild[4], wild[5], encode_s=wild[1], nbytes=-5, raw_nbytes=0, sent_nbytes=-1,
                    )  # fmt: skip
        summary = summarize(run)
        assert summary.verdict
        json.dumps(summary.numbers, allow_nan=False)


def test_a_run_read_from_files_says_the_same(tmp_path: Path) -> None:
    run = made_run(4, 60, noise=NOISY, slow={1: {"input": 0.05}})
    before, after = summarize(run), summarize(read_run(write_run(tmp_path / "run", run)))
    assert before.verdict == after.verdict
    assert [each.rank for each in before.blame] == [each.rank for each in after.blame]


def test_numbers_are_flat_and_known_by_name() -> None:
    said = {"link_bandwidth": 1e9, "predicted_step_s": 0.04, "audit_error": 0.01}
    numbers = summarize(made_run(4, 60, ratio=4.0, encode_s=0.001, stats=said)).numbers
    assert numbers["ratio"] == pytest.approx(4.0)
    assert numbers["link_use"] == pytest.approx(0.5, rel=0.1)
    assert numbers["prediction_error"] == pytest.approx(0.08, abs=0.03)
    assert numbers["world_size"] == 4
    assert all(value is None or isinstance(value, int | float | str) for value in numbers.values())


def test_an_asynchronous_run_tells_of_its_staleness() -> None:
    summary = summarize(made_run(2, 30, stats={"waited_s": 0.1, "staleness_max": 3}))
    assert summary.numbers["waited_s"] == 0.1
    assert any(fact.name == "staleness" for fact in summary.facts)


def test_the_verdict_names_the_cause_and_not_who_followed() -> None:
    run = made_run(2, 30)
    run.ranks[0].errors.append(Error(30, "PeerLost", [1], None, "rank 1 is lost"))
    run.ranks[1].errors.append(Error(30, "ValueError", [], None, "a bad batch"))
    summary = summarize(run)
    assert summary.verdict.startswith("The run broke in step 30 with ValueError.")
    assert [error.what for error in summary.errors] == ["ValueError", "PeerLost"]


def test_of_two_causes_the_verdict_names_who_raised_first() -> None:
    run = made_run(2, 30)
    for rank, (what, at) in enumerate([("RuntimeError", 1009.8), ("KeyError", 1009.0)]):
        run.ranks[rank].errors.append(Error(30, what, [], None, "it broke"))
        run.ranks[rank].flight = [FlightEntry(0, at, 30, Moment.FAILED, None)]
    assert [error.what for error in summarize(run).errors] == ["KeyError", "RuntimeError"]


def switched(run: RunTrace, at: int, predicted_step_s: float = 0.044) -> RunTrace:
    """As if `gs.auto()` had switched there to a plan that sends a tenth; before, steps took thrice as long."""
    for trace in run.ranks.values():
        trace.stats.clear()  # they come now and then, and none since
        trace.choices.append(PlanChoice(at, {}, predicted_step_s, 1e9))
        trace.steps = [
            replace(step, sent_nbytes=step.sent_nbytes // 10)
            if step.step >= at
            else replace(step, step_s=3 * step.step_s, exposed_s=step.exposed_s + 2 * step.step_s)
            for step in trace.steps
        ]
    return run


def test_a_run_that_switched_is_judged_since_then_and_its_prediction_too() -> None:
    before, after = summarize(made_run(2, 60)), summarize(switched(made_run(2, 60), 31))
    assert after.numbers["step_s"] == pytest.approx(before.numbers["step_s"], rel=0.05)
    assert after.numbers["sent_nbytes"] == pytest.approx(before.numbers["sent_nbytes"] / 10, rel=0.01)
    assert after.numbers["steps"] == 60
    assert after.facts[0].meaning == "the middle half of 29 steps, on the average, since gs.auto() chose"
    assert after.numbers["predicted_step_s"] == 0.044  # of the choice, though no stats told it yet
    assert abs(float(after.numbers["prediction_error"] or 1.0)) < 0.1


def test_a_plan_that_hardly_ran_is_not_compared_with_its_prediction() -> None:
    summary = summarize(switched(made_run(2, 60), 55))
    assert "predicted_step_s" not in [name for name, value in summary.numbers.items() if value is not None]
    assert "since" not in summary.facts[0].meaning


@pytest.mark.parametrize("hosts", [2, 4])
def test_no_share_of_a_link_is_above_the_whole(hosts: int) -> None:
    run = made_run(4, 60, hosts=hosts, stats={"link_bandwidth": 1e7})
    summary = summarize(run)
    assert summary.numbers["link_use"] is None
    [fact] = [fact for fact in summary.facts if fact.name == "bus bandwidth"]
    assert "%" not in fact.meaning
    assert "the probe found 10 MB/s between hosts" in fact.meaning
    assert ("inside of a host" in fact.meaning) == (hosts == 2)  # two ranks on each
    assert fact.meaning.endswith("gives more by now")


def test_a_share_of_a_link_is_told_where_it_can_be() -> None:
    run = made_run(2, 60, stats={"link_bandwidth": 2e9})
    [fact] = [fact for fact in summarize(run).facts if fact.name == "bus bandwidth"]
    assert "% of the 2 GB/s that the probe found" in fact.meaning


@pytest.mark.parametrize(("pace", "whom"), [("async_sgd", "the parameters' owners"), ("gossip", "a neighbour")])
def test_where_no_rank_waits_for_the_last_one_none_is_said_to(pace: str, whom: str) -> None:
    run = made_run(4, 60, overlap=False)
    for trace in run.ranks.values():
        trace.run = replace(trace.run, plan={"pace": {"kind": pace}})
    summary = summarize(run)
    assert summary.verdict.endswith(f"of it is waiting for {whom}")
    assert [fact.name for fact in summary.facts][:4] == ["step", "overhead", "exposed", "compute"]
    assert not any("overlaps" in each.text for each in summary.warnings)  # it does not come with backward


def test_ranks_of_one_host_whose_bytes_are_not_known_have_no_network() -> None:
    for hosts, name in ((1, "exchange"), (2, "network")):
        run = made_run(2, 60, source="ddp", hosts=hosts)
        for trace in run.ranks.values():
            trace.steps = [replace(step, nbytes=0) for step in trace.steps]
        assert f"the {name}" in summarize(run).verdict


def test_a_rank_alone_waits_for_nobody() -> None:
    summary = summarize(made_run(1, 60))
    assert summary.verdict.startswith("One rank trains alone")
    assert [fact.name for fact in summary.facts] == ["step", "compute"]
