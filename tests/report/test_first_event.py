"""What happened first is named rightly, in random runs, however a run can end; also in hostile folders."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from gradsync.report.post_mortem.first_event import Incident, first_event, quiet_end
from gradsync.report.post_mortem.incident import ADVICE, IncidentLocation
from gradsync.report.post_mortem.last_seen import last_seen
from gradsync.trace.flight import Flight, FlightEntry, Moment
from gradsync.trace.lines import ClockShift, Error, Health, RankEnd
from gradsync.trace.reader import RunTrace, read_run
from made_runs import made_run, write_run

SEEDS = range(25)
DOING = {
    Moment.FORWARD: "it was in its forward",
    Moment.BACKWARD: "it was in its backward",
    Moment.WAITING: "it waited for bucket",
    Moment.OPTIMIZER: "it was in its optimizer",
    Moment.INPUT: "it was in its input",
}


class Stage:
    """A run that went wrong in some step, on some rank."""

    def __init__(self, seed: int, clocks: bool = True) -> None:
        rng = self.rng = random.Random(seed)
        self.ranks, self.step = rng.randint(2, 6), rng.randint(2, 30)
        self.culprit = rng.randrange(self.ranks)
        self.bucket = rng.randrange(4)
        self.others = [rank for rank in range(self.ranks) if rank != self.culprit]
        self.run = made_run(self.ranks, self.step - 1, seed, hosts=rng.randint(1, 2))
        self.at = 2000.0
        self.shifts = dict.fromkeys(range(self.ranks), 0.0)
        for rank, trace in self.run.ranks.items():
            trace.end = None
            if clocks and rank:
                self.shifts[rank] = rng.uniform(-1e4, 1e4)
                trace.clocks = [ClockShift(0, self.shifts[rank], 1e-4)]

    def saw(self, rank: int, moment: Moment, after_s: float, bucket: int | None = None) -> None:
        """By rank 0's clock."""
        flight = self.run.ranks[rank].flight
        flight.append(FlightEntry(len(flight), self.at + after_s - self.shifts[rank], self.step, moment, bucket))

    def raised(self, rank: int, what: str, ranks: list[int], after_s: float, text: str = "it broke") -> None:
        self.saw(rank, Moment.WAITING, 0.0, self.bucket)
        self.saw(rank, Moment.FAILED, after_s)
        self.run.ranks[rank].errors.append(Error(self.step, what, ranks, self.bucket, text))

    def incident(self) -> Incident:
        incident = first_event(self.run)
        assert incident is not None
        assert incident.advice
        return incident


def scene(seed: int, what: str, text: str = "") -> tuple[Stage, Moment]:
    """Somebody stops; the others raise `what` and name it, or one who has named it before."""
    stage = Stage(seed)
    moment = stage.rng.choice(list(DOING))
    stage.saw(stage.culprit, moment, 0.0, stage.bucket if moment == Moment.WAITING else None)
    order = stage.rng.sample(stage.others, len(stage.others))
    for place, rank in enumerate(order):
        named = stage.culprit if place == 0 else stage.rng.choice([stage.culprit, *order[:place]])
        stage.raised(rank, what, [named], 0.02 + 0.1 * place, text)
    return stage, moment


def test_a_killed_rank_is_named_with_what_it_did() -> None:
    for seed in SEEDS:
        stage, moment = scene(seed, "PeerLost", "rank 1 died in step 3")
        incident, host = stage.incident(), stage.run.ranks[stage.culprit].run.host
        assert (incident.kind, incident.ranks, incident.step) == ("killed", [stage.culprit], stage.step)
        assert incident.text.startswith(
            f"Rank {stage.culprit} (host {host}, pid {4000 + stage.culprit}) ended without a word in step {stage.step} "
            f"while {DOING[moment]}"
        )
        assert "20 ms after it was last seen, rank" in incident.text
        assert "raised PeerLost naming it in bucket" in incident.text
        if moment == Moment.WAITING:
            assert incident.parameters == [f"layers.{7 - 2 * stage.bucket - each}.weight" for each in (0, 1)]


def test_a_rank_that_hangs_is_named_with_where() -> None:
    for seed in SEEDS:
        stage, moment = scene(seed, "SyncTimeout")
        incident = stage.incident()
        assert (incident.kind, incident.ranks) == ("hang", [stage.culprit])
        assert f"did not arrive in step {stage.step} while {DOING[moment]}" in incident.text


def test_a_rank_that_came_too_late_and_says_so_itself_hung() -> None:
    stage = Stage(1)
    for rank in range(stage.ranks):
        stage.raised(rank, "SyncTimeout", [stage.culprit], 1.0)
    assert (stage.incident().kind, stage.incident().ranks) == ("hang", [stage.culprit])


def test_a_rank_that_came_when_all_had_given_up_is_told_as_it_was_before() -> None:
    for seed in SEEDS:
        stage = Stage(seed)
        stage.saw(stage.culprit, Moment.INPUT, 0.0)
        for rank in stage.others:
            stage.raised(rank, "SyncTimeout", [stage.culprit], 3.0)
        stage.at += 8.0
        stage.saw(stage.culprit, Moment.FORWARD, 0.0)
        stage.raised(stage.culprit, "SyncTimeout", [stage.culprit], 0.1)
        incident = stage.incident()
        assert (incident.kind, incident.ranks) == ("hang", [stage.culprit])
        assert "did not arrive in step" in incident.text
        assert "while it was in its input. 3 s after it was last seen, rank" in incident.text


def test_a_rank_without_a_sign_of_life_has_vanished() -> None:
    stage, _ = scene(3, "PeerLost", "rank 1 gives no sign of life, last seen waiting in step 3")
    assert (stage.incident().kind, stage.incident().ranks) == ("vanished", [stage.culprit])


@pytest.mark.parametrize("why", ["exit", "detach"])
def test_a_rank_that_ended_early_left(why: str) -> None:
    for seed in SEEDS:
        stage, _ = scene(seed, "PeerLost")
        stage.saw(stage.culprit, Moment.LEFT, 0.001)
        stage.run.ranks[stage.culprit].end = RankEnd(stage.step, why)
        incident = stage.incident()
        assert (incident.kind, incident.ranks) == ("left", [stage.culprit])
        assert ("ended by itself" if why == "exit" else "detached") in incident.text


def test_an_exception_of_its_own_is_the_cause_and_the_others_followed() -> None:
    for seed in SEEDS:
        stage = Stage(seed)
        stage.raised(stage.culprit, "ZeroDivisionError", [], 0.01, "division by zero")
        for rank in stage.others:
            stage.raised(rank, "PeerLost", [stage.culprit], 0.2)
        incident = stage.incident()
        assert (incident.kind, incident.ranks) == ("raised", [stage.culprit])
        assert "raised ZeroDivisionError" in incident.text
        assert "division by zero." in incident.text
        assert "followed 190 ms later (PeerLost)." in incident.text


@pytest.mark.parametrize(
    ("what", "error"),
    [("nonfinite", "NonFinite"), ("drift", "Disagreement"), ("order", "Disagreement"), ("loss_scale", "Disagreement")],
)
def test_what_a_guard_found_is_named_with_rank_and_parameter(what: str, error: str) -> None:
    for seed in SEEDS:
        stage = Stage(seed)
        found = Health(stage.step, what, [stage.culprit], "layers.1.weight", 3, "it is so")
        for rank in range(stage.ranks):
            stage.run.ranks[rank].health.append(found)
            stage.raised(rank, error, [], 0.01)
        incident = stage.incident()
        assert (incident.kind, incident.ranks, incident.step) == (what, [stage.culprit], stage.step)
        assert incident.parameters == ["layers.1.weight"]
        assert incident.stopped


def test_a_finding_that_did_not_stop_the_run_is_told_too() -> None:
    found = Health(12, "nonfinite", [2], "layers.3.weight", 5, "5 of 125000 values")
    incident = first_event(made_run(4, 30, health=(found,)))
    assert incident is not None
    assert (incident.kind, incident.ranks, incident.step, incident.stopped) == ("nonfinite", [2], 12, False)
    assert incident.text == (
        "Rank 2 had NaN or Inf in the gradient of layers.3.weight in step 12: 5 of 125000 values. The run went on."
    )


def test_an_old_finding_is_not_taken_for_the_cause_of_a_death() -> None:
    stage, _ = scene(5, "PeerLost")
    stage.run.ranks[0].health.append(Health(1, "nonfinite", [0], "w", 1, "once"))
    assert (stage.incident().kind, stage.incident().ranks) == ("killed", [stage.culprit])


def test_a_disagreement_without_a_finding_speaks_for_itself() -> None:
    stage = Stage(2)
    for rank in range(stage.ranks):
        stage.raised(rank, "Disagreement", [], 0.0, "rank 0 has 4 parameters, rank 1 has 5")
    assert stage.incident().kind == "disagreement"
    assert "rank 0 has 4 parameters, rank 1 has 5." in stage.incident().text


def test_ranks_that_lost_each_other_and_live_point_at_the_network() -> None:
    stage = Stage(0)
    for rank in range(stage.ranks):
        stage.raised(rank, "PeerLost", [(rank + 1) % stage.ranks], 0.1)
    assert (stage.incident().kind, stage.incident().ranks) == ("network", list(range(stage.ranks)))


def test_a_timeout_that_names_nobody_is_the_networks() -> None:
    stage = Stage(0)
    for rank in range(stage.ranks):
        stage.raised(rank, "SyncTimeout", [], 0.1, "every rank is here, but the data does not arrive")
    assert stage.incident().kind == "network"


def test_a_stock_run_whose_transport_broke_names_the_rank_that_was_gone() -> None:
    stage = Stage(7)
    stage.saw(stage.culprit, Moment.BACKWARD, 0.0)
    for rank in stage.others:
        stage.raised(rank, "RuntimeError", [stage.culprit], 0.1, "Connection closed by peer")
        stage.run.ranks[rank].end = RankEnd(stage.step, "exception")
    assert (stage.incident().kind, stage.incident().ranks) == ("killed", [stage.culprit])


def test_who_raised_on_its_own_account_began_it_though_all_others_were_gone_when_it_looked() -> None:
    for seed in SEEDS:
        stage = Stage(seed)
        stage.raised(stage.culprit, "RuntimeError", stage.others, 0.5, "shapes differ")
        for rank in stage.others:
            stage.raised(rank, "PeerLost", [stage.culprit], 0.1)
        assert (stage.incident().kind, stage.incident().text.count("shapes differ")) == ("raised", 1)
        assert f"Rank {stage.culprit} (host" in stage.incident().text


def test_a_rank_whose_file_is_not_here_is_named_nonetheless() -> None:
    stage, _ = scene(4, "PeerLost")
    del stage.run.ranks[stage.culprit]
    incident = stage.incident()
    assert (incident.kind, incident.ranks) == ("killed", [stage.culprit])
    assert f"Not in this folder: the file of rank {stage.culprit}." in incident.text


def test_a_stock_run_whose_ranks_raise_nothing_shows_who_stopped_first() -> None:
    for seed in SEEDS:
        stage = Stage(seed)
        stage.step = max(3, stage.step)
        stage.saw(stage.culprit, Moment.BACKWARD, 0.0)
        stage.step += 1
        for rank in stage.others:
            stage.saw(rank, Moment.WAITING, 0.1)
            stage.run.ranks[rank].end = RankEnd(stage.step, "exit")
        assert (stage.incident().kind, stage.incident().ranks) == ("killed", [stage.culprit])


def test_when_nobody_moves_the_one_who_does_not_wait_is_named() -> None:
    for seed in SEEDS:
        stage = Stage(seed)
        stage.saw(stage.culprit, Moment.INPUT, 0.0)
        for rank in stage.others:
            stage.saw(rank, Moment.WAITING, 1.0, 0)
        started = stage.run.ranks[0].run.started
        assert first_event(stage.run) is None
        assert first_event(stage.run, now=started + 1001 + 30) is None
        assert quiet_end(stage.run, started + 1001 + 30).endswith(f"came to step {stage.step}, 30 s ago.")
        incident = first_event(stage.run, now=started + 1001 + 300)
        assert incident is not None
        assert (incident.kind, incident.ranks) == ("stopped", [stage.culprit])
        assert incident.text.startswith("No rank has moved for 300 s")


def test_a_clean_run_has_no_event() -> None:
    for seed in SEEDS:
        run = made_run(random.Random(seed).randint(1, 6), 20, seed)
        assert first_event(run, now=1e18) is None
        who = "Rank 0" if len(run.ranks) == 1 else f"All {len(run.ranks)} ranks that wrote here"
        assert quiet_end(run, 1e18) == f"{who} ended in good order, after step 20."


def test_a_clean_run_that_lacks_a_file_is_not_called_clean() -> None:
    run = made_run(3, 20)
    del run.ranks[1]
    incident = first_event(run, now=1e18)
    assert incident is not None
    assert (incident.kind, incident.ranks, incident.stopped) == ("missing", [1], False)
    assert incident.text == (
        "All 2 ranks that wrote here ended in good order, after step 20. How rank 1 ended nobody can say. Not in this "
        "folder: the file of rank 1."
    )
    assert "rank-*.jsonl" in incident.advice
    assert first_event(run) is None  # a live page has a warning of it


def test_a_file_that_cannot_be_read_is_not_said_to_be_elsewhere() -> None:
    run = made_run(2, 20)
    del run.ranks[1]
    run.refused[1] = "format 1, and this gradsync reads 2"
    incident = first_event(run, now=1e18)
    assert incident is not None
    assert "Not in this folder" not in incident.text
    assert "The file of rank 1 could not be read: format 1" in incident.text


@pytest.mark.parametrize("source", ["gradsync", "ddp"])
@pytest.mark.parametrize("what", ["PeerLost", "SyncTimeout"])
def test_advice_holds_the_pids_and_what_the_user_has(what: str, source: str) -> None:
    run = made_run(3, 20, source=source, names=("node-a", "node-b"), killed={2: 10})
    for rank in (0, 1):
        run.ranks[rank].errors.append(Error(10, what, [2], 0, "no sign of life" if what == "PeerLost" else "late"))
        run.ranks[rank].end = None
    incident = first_event(run)
    assert incident is not None
    said = incident.advice
    if what == "PeerLost":
        assert "(ps -o stat,wchan:20,cmd -p 4002 on node-b)" in said
        assert "ping node-b" in said
    else:
        assert "py-spy dump --pid 4002 on node-b" in said
        assert ("gs.Guard(timeout=seconds)" in said) == (source == "gradsync")
        assert ("init_process_group(timeout=...)" in said) == (source == "ddp")


def test_a_rank_that_had_fewer_batches_is_met_with_join() -> None:
    run = made_run(2, 20)
    text = "rank 0 is in a synchronization but rank 1 is in detach()"
    run.ranks[0].errors.append(Error(21, "Disagreement", [], None, text))
    run.ranks[0].end = None
    incident = first_event(run)
    assert incident is not None
    assert incident.kind == "left"
    assert "with sync.join():" in incident.advice


def test_of_a_step_that_was_dropped_nobody_is_told_how_to_drop_it() -> None:
    for dropped in (False, True):
        run = made_run(2, 20, health=(Health(9, "nonfinite", [1], "w", 3, "rank 1 had NaN in w"),))
        for trace in run.ranks.values():
            trace.steps = [replace(step, counts=step.step != 9 or not dropped) for step in trace.steps]
        incident = first_event(run)
        assert incident is not None
        assert ("The step was dropped on all ranks." in incident.advice) == dropped
        assert ("gs.Guard(nonfinite='skip')" in incident.advice) != dropped


def test_of_a_standstill_all_processes_are_listed_by_host() -> None:
    run = made_run(4, 20)
    for trace in run.ranks.values():
        trace.end = None
    incident = first_event(run, now=1e18)
    assert incident is not None
    assert "ps -p 4000,4001 on a, ps -p 4002,4003 on b" in incident.advice
    assert "py-spy dump --pid 400" in incident.advice


def test_no_advice_has_a_hole_and_a_hosts_name_is_no_command() -> None:
    for kind in ADVICE:
        for source in ("gradsync", "ddp"):
            for names in (("a; rm -rf $HOME", "{x}"), ("b",)):
                run = made_run(2, 5, source=source, names=names)
                said = IncidentLocation(run, [0], 3).incident(kind, "It was so.").advice
                assert not set("{}") & set(said.replace("{x}", ""))
                assert "PID" not in said
                assert "ping a;" not in said


def test_ranks_of_hosts_without_clock_lines_are_put_in_order_by_the_wall_clock() -> None:
    run = made_run(2, 5, hosts=2)
    run.ranks[0].clocks, run.ranks[1].clocks = [], []
    object.__setattr__(run.ranks[1].run, "clock", 500.0)  # booted 500 s later
    run.ranks[0].flight = [FlightEntry(0, 1010.0, 6, Moment.FORWARD, None)]
    run.ranks[1].flight = [FlightEntry(0, 509.0, 6, Moment.FORWARD, None)]
    seen = last_seen(run)
    assert (seen[0].at, seen[1].at) == (1010.0, 1009.0)


def test_files_tell_the_same_as_memory(tmp_path: Path) -> None:
    lost = Error(10, "PeerLost", [1], 0, "rank 1 (pid 4001) died in step 10")
    write_run(tmp_path, made_run(2, 20, killed={1: 10}, errors={0: lost}))
    incident = first_event(read_run(tmp_path))
    assert incident is not None
    assert (incident.kind, incident.ranks, incident.step, incident.bucket) == ("killed", [1], 10, 0)
    assert "layers.7.weight" in incident.parameters


@pytest.mark.parametrize("seed", range(30))
def test_hostile_folders_give_a_sentence_or_nothing_but_no_traceback(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    write_run(tmp_path, scene(seed, "PeerLost")[0].run)
    for path in tmp_path.iterdir():
        content = bytearray(path.read_bytes())
        for _ in range(rng.randint(1, 30)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        path.write_bytes(content[: rng.randint(len(content) // 2, len(content))])
    _add_hostile_lines(tmp_path, rng)
    try:
        run: RunTrace = read_run(tmp_path)
    except ValueError:
        return
    incident = first_event(run, now=rng.choice([0.0, 1e12]))
    assert incident is None or (incident.text and len(incident.text) < 20000)
    assert quiet_end(run, 0.0)


def _add_hostile_lines(folder: Path, rng: random.Random) -> None:
    wild = [-1, 0, 1, 2**40, 10**9]
    lines = [
        {"kind": "error", "step": rng.choice(wild), "what": "PeerLost", "ranks": rng.choices(wild, k=300), "text": ""},
        {"kind": "error", "step": 1, "what": "\x1b[31m", "ranks": [], "bucket": rng.choice(wild), "text": "x" * 9000},
        {"kind": "health", "step": rng.choice(wild), "what": "drift", "ranks": rng.choices(wild, k=300), "text": ""},
        {"kind": "layout", "step": 0, "buckets": [{"bucket": 0, "parameters": wild, "nbytes": 1}]},
        {"kind": "clock", "step": 0, "offset_s": 1e18, "error_s": 0.0},
        {"kind": "end", "step": rng.choice(wild), "why": "x"},
    ]
    for path in sorted(folder.glob("*.jsonl")):
        with path.open("a") as file:
            file.write("\n" + "".join(f"{json.dumps(line)}\n" for line in rng.sample(lines, rng.randint(0, 3))))


def test_a_flight_that_is_not_a_number_counts_for_nothing(tmp_path: Path) -> None:
    flight = Flight(tmp_path / "rank-0.flight")
    flight.close()
    assert os.path.getsize(tmp_path / "rank-0.flight") == 4096
    run = made_run(2, 5)
    run.ranks[0].flight = [FlightEntry(0, float("nan"), 9, Moment.FORWARD, None)]
    assert last_seen(run)[0].step == 5
