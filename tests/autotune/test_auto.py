"""Laws of `gs.auto()`: all ranks switch at the same step, replicas stay equal, an exact choice changes no bit."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import gradsync as gs
from autos import BUCKETS, Training, choosing, cluster, off, overhearing, predicted
from gradsync.autotune.decide import describe_choice, describe_miss
from gradsync.plan.auto import PROFILING
from gradsync.planner.predict import quality
from gradsync.trace.reader import read_run
from gradsync.transport.host_meeting import declare_host
from in_a_tree import in_a_tree

Run = Callable[..., list[Any]]


def check_exact_choice() -> tuple[list[str], list[dict[str, Any]]]:
    yardstick = Training(gs.Plan())
    theirs = yardstick.train(range(10))
    with choosing(BUCKETS), overhearing():
        run = Training(gs.auto(cluster=cluster(), steps=3))
        ours = run.train(range(10), slow=lambda step: dist.get_rank() == 1 and step in (1, 3, 4))
    assert ours == theirs
    for each in (yardstick, run):
        each.sync.detach()
    return ours, [plan.canonical() for plan in run.plans]


def test_an_exact_choice_trains_to_the_bit_and_all_ranks_switch_at_the_same_step(run: Run) -> None:
    one, two = run(check_exact_choice)
    assert one == two
    assert one[1] == [PROFILING.canonical()] * 4 + [BUCKETS.canonical()] * 6


def check_compressed_choice() -> list[str]:
    with choosing(gs.Plan(compress=gs.int8())), overhearing():
        run = Training(gs.auto(cluster=cluster(ranks=3), steps=2, allow="lossy"))
        digests = run.train(range(8))
    assert run.sync.residuals().keys() == {name for name, _ in run.model.named_parameters()}
    run.sync.detach()
    return digests


def test_replicas_are_equal_through_a_switch_to_a_lossy_plan(run: Run) -> None:
    one, *others = run(check_compressed_choice, ranks=3)
    assert others == [one, one]


@pytest.mark.parametrize("hosts", ["aab", "abb", "abc"])
def test_all_ranks_switch_at_the_same_step_where_they_agree_by_a_tree(hosts: str, run: Run) -> None:
    one, *others = run(in_a_tree, check_compressed_choice, hosts, ranks=3)
    assert others == [one, one]


def check_allowed(allow: str) -> str:
    with overhearing():
        run = Training(gs.auto(allow=allow, cluster=cluster(bandwidth=1e5), steps=2))
        run.train(range(5))
        found = quality(run.sync.plan)
        run.sync.detach()
    return found


@pytest.mark.parametrize("allow", ["exact", "16-bit", "lossy"])
def test_over_a_slow_link_it_chooses_as_far_as_it_may(allow: str, run: Run) -> None:
    assert run(check_allowed, allow) == [allow, allow]


def check_probing() -> bool:
    with overhearing() as said:
        run = Training(gs.auto(steps=2))
        run.train(range(5))
        run.sync.detach()
    assert run.sync.stats()["predicted_step_s"] is not None
    assert (dist.get_rank() == 0) == ("(links measured here)" in said.getvalue())
    return quality(run.sync.plan) in ("exact", "16-bit")


def test_without_a_cluster_it_probes_the_links(run: Run) -> None:
    assert run(check_probing) == [True, True]


def check_stats() -> None:
    with choosing(BUCKETS, step_s=0.25) as profiles, overhearing() as said:
        run = Training(gs.auto(cluster=cluster(), steps=2))
        run.train(range(3))
        assert run.sync.stats()["predicted_step_s"] is None
        assert run.sync.stats()["steps"] == 3
        run.train(range(3, 5))
    stats = run.sync.stats()
    assert (stats["predicted_step_s"], stats["steps"]) == (0.25, 5)
    assert stats["step_s"] > 0
    assert len(profiles) == (1 if dist.get_rank() == 0 else 0)
    for profile in profiles:
        assert sorted(g.name for g in profile.gradients) == sorted(name for name, _ in run.model.named_parameters())
        assert min(profile.forward_s, profile.backward_s, profile.optimizer_s) > 0
    sentences = said.getvalue().splitlines()
    assert len(sentences) == len(profiles)
    for sentence in sentences:
        assert sentence.startswith("gradsync: auto chose exact · 0.000977 MiB buckets from step 3 on: 250 ms a step")
        assert sentence.endswith("because we say so. The default plan would take 500 ms")
    run.sync.detach()


def test_stats_and_the_log_of_rank_0_tell_the_choice(run: Run) -> None:
    run(check_stats)


def test_the_log_says_when_the_default_is_kept() -> None:
    told = describe_choice(predicted(gs.Plan()), predicted(gs.Plan()), 6, calibrated=True)
    assert told.startswith("auto keeps the default plan from step 6 on: 1 s a step predicted")
    assert "(+50 %): 5 steps are profiled again" in describe_miss(0.15, 0.1, 200, 5)


def check_nothing_left() -> None:
    before, files = threading.active_count(), _open_files()
    fixed = Training(gs.Plan())
    threads = threading.active_count()
    fixed.sync.detach()
    plans = [gs.Plan(compress=gs.int8()), BUCKETS, gs.Plan(algorithm=gs.native())]
    with choosing(*plans), off(True, True), overhearing():
        run = Training(gs.auto(cluster=cluster(), steps=1, recheck_every=1))
        run.train(range(12))
        assert run.sync.plan == plans[2]
        assert threading.active_count() <= threads
        run.sync.detach()
    assert threading.active_count() == before
    assert _open_files() <= files


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_threads_and_connections_of_earlier_plans_are_gone(run: Run) -> None:
    run(check_nothing_left)


# What can go wrong


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"allow": "fast"}, 'allow must be "exact", "16-bit" or "lossy", got \'fast\''),
        ({"allow": "all"}, "other paces change what is learned"),
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"recheck_every": True}, "recheck_every must be a whole number of at least 1, got True"),
        ({"cluster": 3}, "cluster must be a gs.Cluster or the path of a cluster.toml, got 3"),
        ({"save": 3}, "save must be the path of a folder, got 3"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence):
        gs.auto(**arguments)


def check_disagreement() -> None:
    with pytest.raises(gs.Disagreement, match="the plans differ: auto is"):
        Training(gs.auto(allow="exact" if dist.get_rank() else "lossy", cluster=cluster()))
    with pytest.raises(gs.Disagreement, match="the plans differ: auto is"):
        Training(gs.auto(cluster=cluster()) if dist.get_rank() else PROFILING)
    with pytest.raises(ValueError, match="the cluster has 3 ranks, but 2 attach"):
        Training(gs.auto(cluster=cluster(ranks=3)))


def test_ranks_must_ask_for_the_same(run: Run) -> None:
    run(check_disagreement)


def check_alone() -> None:
    with overhearing() as said:
        run = Training(gs.auto())
        run.train(range(8))
    assert run.sync.plan == gs.Plan()
    assert said.getvalue().count("auto has nothing to choose") == 1
    run.sync.detach()


def test_one_rank_alone_has_nothing_to_choose(run: Run) -> None:
    run(check_alone, ranks=1)


def _fails(*_: object, **__: object) -> None:
    raise OSError("no route to host")


def check_failed_probe() -> None:
    broken = patch("gradsync.autotune.decide.measure", _fails)
    with broken, warnings.catch_warnings(record=True) as caught, overhearing():
        warnings.simplefilter("always")
        run = Training(gs.auto(steps=1))
        run.train(range(4))
    told = [str(each.message) for each in caught]
    assert len(told) == (dist.get_rank() == 0)
    assert all("could not probe the links" in each and "no route to host" in each for each in told)
    assert run.plans == [gs.Plan()] * 4
    assert run.sync.stats()["predicted_step_s"] is None
    run.sync.detach()


def test_a_failed_probe_leaves_all_ranks_with_the_default_plan(run: Run) -> None:
    run(check_failed_probe)


def check_failed_choice() -> None:
    rank = dist.get_rank()
    broken = patch("gradsync.autotune.decide.recommend", _fails)
    for chosen, trouble, sentence in (
        (gs.Plan(), broken, "could not choose a plan"),
        (gs.Plan(algorithm=gs.shared_memory()), hosts_of_their_own(), "chose a plan that cannot run here"),
    ):
        with choosing(chosen), trouble, warnings.catch_warnings(record=True) as caught, overhearing():
            warnings.simplefilter("always")
            run = Training(gs.auto(cluster=cluster(), steps=1))
            run.train(range(4))
        assert [sentence in str(each.message) for each in caught] == [True] * (rank == 0)
        assert run.plans == [PROFILING] * 2 + [gs.Plan()] * 2
        run.sync.detach()


@contextmanager
def hosts_of_their_own() -> Iterator[None]:
    """Every rank is alone on its host."""
    declare_host(f"h{dist.get_rank()}")
    try:
        yield
    finally:
        declare_host(None)


def test_a_failed_choice_leaves_all_ranks_with_the_default_plan(run: Run) -> None:
    run(check_failed_choice)


# Looking after the prediction


def check_rechecks() -> tuple[str, list[str]]:
    plans = [BUCKETS, gs.Plan(compress=gs.bf16()), BUCKETS, gs.Plan(compress=gs.bf16())]
    with choosing(*plans, step_s=0.5), off(False, True, True, True), overhearing() as said:
        run = Training(gs.auto(cluster=cluster(), steps=1, recheck_every=3))
        digests = run.train(range(30))
    assert said.getvalue().count("where 500 ms were predicted") == 3 * (dist.get_rank() == 0)
    run.sync.detach()
    kinds = {PROFILING: "p", BUCKETS: "b", gs.Plan(compress=gs.bf16()): "h"}
    return "".join(kinds[plan] for plan in run.plans), digests


def test_a_miss_profiles_again_and_misses_in_a_row_wait_ever_longer(run: Run) -> None:
    one, two = run(check_rechecks)
    assert one == two
    # 2 exact; 3 and 3 good; miss: 2 exact, 3; miss: 2 exact, 6; miss: 2 exact, then what fits.
    assert one[0] == "pp" + "bbbbbb" + "pp" + "hhh" + "pp" + "bbbbbb" + "pp" + "hhhhhhh"


def check_reprobing() -> int:
    probes = []

    def measure(parent: object, brief: bool) -> Any:
        probes.append(brief)
        return type("Findings", (), {"cluster": cluster(), "warnings": ()})

    # The step is off, and then the time of a synchronization is; the second time only the step is.
    with patch("gradsync.autotune.decide.measure", measure), off(True, True, True, False), choosing(BUCKETS):
        with overhearing():
            run = Training(gs.auto(steps=1, recheck_every=2))
            run.train(range(12))
        run.sync.detach()
    assert all(probes)
    return len(probes)


def test_links_are_probed_again_only_if_synchronizations_take_another_time(run: Run) -> None:
    assert run(check_reprobing) == [2, 2]


# What is saved


def check_saving(folder: str) -> None:
    with choosing(gs.Plan(compress=gs.bf16()), step_s=0.5), overhearing():
        run = Training(gs.auto(cluster=cluster(), steps=2, save=Path(folder) / "run"))
        run.train(range(9))
        run.sync.detach()


def test_the_folder_holds_the_grounds_of_the_choice_and_the_steps_after_it(run: Run, tmp_path: Path) -> None:
    run(check_saving, str(tmp_path))
    assert gs.Plan.load(tmp_path / "run" / "plan.toml") == gs.Plan(compress=gs.bf16())
    assert gs.Cluster.load(tmp_path / "run" / "cluster.toml") == cluster()
    assert gs.ModelProfile.load(tmp_path / "run" / "profile.toml").source == "measured"
    for rank in (0, 1):
        trace = read_run(tmp_path / "run").ranks[rank]
        assert [(choice.step, choice.predicted_step_s) for choice in trace.choices] == [(3, 0.5)]
        assert trace.choices[0].plan == gs.Plan(compress=gs.bf16()).canonical()
        assert [line.step for line in trace.steps] == list(range(9))


def check_unwritable(folder: str) -> None:
    (Path(folder) / f"file{dist.get_rank()}").write_text("")
    with choosing(BUCKETS), warnings.catch_warnings(record=True) as caught, overhearing():
        warnings.simplefilter("always")
        run = Training(gs.auto(cluster=cluster(), steps=1, save=f"{folder}/file{dist.get_rank()}"))
        run.train(range(4))
    told = [str(each.message) for each in caught]
    assert ["training goes on" in each for each in told] == [True] * (2 if dist.get_rank() == 0 else 1)
    assert run.sync.plan == BUCKETS
    run.sync.detach()


def test_a_folder_that_cannot_be_written_ends_no_training(run: Run, tmp_path: Path) -> None:
    run(check_unwritable, str(tmp_path))
