"""The trace of an attached model: every step, phase and bucket, whatever the plan; and it changes no bit."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs
from autos import Training, choosing, cluster, off, overhearing
from gradsync.engine.clock_offset import ClockOffset, estimate
from gradsync.trace.flight import Moment, read_flight
from gradsync.trace.reader import RankTrace, read_run
from gradsync.transport.host_meeting import declare_host

Run = Callable[..., list[Any]]
STEPS = 6
PHASES = ["optimizer", "input", "forward", "backward", "wait"]


LOADING_S, LOGGING_S = 0.003, 0.05  # of each batch where the loader is ours


def slowly(batches: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    for batch in batches:
        time.sleep(LOADING_S)
        yield batch


def train(folder: str | None, plan: gs.Plan | None = None, steps: int = STEPS, exact: bool = False) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    sync = gs.attach(model, optimizer, plan, trace=folder)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(4, 64, generator=generator) for _ in range(steps)]
    for batch in sync.data(slowly(batches)) if exact else batches:
        if exact:
            time.sleep(LOGGING_S)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    while sync.drain():
        optimizer.step()
        optimizer.zero_grad()
    stats = sync.stats()
    sync.detach()
    return [stats, [param.detach().clone() for param in model.parameters()]]


def traced(run: Run, folder: Path, *args: Any, ranks: int = 2) -> dict[int, RankTrace]:
    run(train, str(folder), *args, ranks=ranks)
    traces = read_run(folder)
    assert traces.missing == []
    return traces.ranks


def test_every_step_has_its_phases_in_order(run: Run, tmp_path: Path) -> None:
    for trace in traced(run, tmp_path, gs.Plan(bucket_bytes=4096)).values():
        assert [step.step for step in trace.steps] == list(range(STEPS))
        assert [phase.name for phase in trace.steps[0].phases] == PHASES[1:]
        for step in trace.steps[1:]:
            assert [phase.name for phase in step.phases] == PHASES
            borders = [moment for phase in step.phases for moment in (phase.start, phase.stop)]
            assert borders == sorted(borders)
            assert 0 <= borders[0] <= borders[-1] <= step.step_s + 1e-6
            assert step.own_s + step.exposed_s == pytest.approx(step.step_s, abs=2e-6)
        ends = [step.at + step.step_s for step in trace.steps]
        assert ends[:-1] == pytest.approx([step.at for step in trace.steps[1:]], abs=2e-6)
        assert trace.end is not None
        assert trace.end.why == "detach"
        assert trace.num_unreadable == 0


def test_every_bucket_and_gradient_has_its_moments(run: Run, tmp_path: Path) -> None:
    for trace in traced(run, tmp_path, gs.Plan(bucket_bytes=4096)).values():
        layout = trace.layouts[-1].buckets
        assert sorted(index for bucket in layout for index in bucket.parameters) == list(range(6))
        step = trace.steps[-1]
        assert step.buckets is not None
        assert step.gradients is not None
        assert [bucket.bucket for bucket in step.buckets] == [bucket.bucket for bucket in layout]
        assert sorted(index for index, _ in step.gradients) == list(range(6))
        ready = dict(step.gradients)
        for bucket, plan in zip(step.buckets, layout, strict=True):
            assert bucket.ready is not None
            assert bucket.ready >= max(ready[index] for index in plan.parameters) - 1e-6
            moments = [bucket.ready, bucket.launched, bucket.sent, bucket.done]
            assert moments == sorted(moments, key=lambda moment: moment or 0.0)
            assert None not in (*moments, bucket.wait_from, bucket.wait_to)
        assert step.nbytes == sum(bucket.nbytes for bucket in layout)
        assert step.header is not None


@pytest.mark.parametrize(
    ("plan", "num_steps", "compressor"),
    [
        (gs.Plan(compress=gs.int8()), STEPS, "int8"),
        (gs.Plan(compress=gs.powersgd(2)), STEPS, "powersgd"),
        (gs.Plan(pace=gs.accumulate(2)), STEPS // 2 + 1, None),  # drain() makes one more
        (gs.Plan(overlap="none"), STEPS, None),
        (gs.Plan(pace=gs.delayed(1)), STEPS, None),
        (gs.Plan(pace=gs.local_sgd(2)), STEPS, None),
        (gs.Plan(pace=gs.async_sgd(max_staleness=2)), STEPS, None),
        (gs.Plan(pace=gs.gossip()), STEPS, None),
    ],
)
def test_every_kind_of_plan_leaves_a_trace(
    run: Run, tmp_path: Path, plan: gs.Plan, num_steps: int, compressor: str | None
) -> None:
    for trace in traced(run, tmp_path, plan).values():
        assert len(trace.steps) == num_steps
        assert {phase.name for step in trace.steps for phase in step.phases} >= {"forward", "backward", "optimizer"}
        if compressor is not None:
            last = trace.steps[-1]
            assert 0 < last.nbytes < last.raw_nbytes
            assert min(last.encode_s, last.decode_s) > 0
            assert compressor in {bucket.compressor for bucket in trace.layouts[-1].buckets}


@pytest.mark.parametrize("compressor", [None, gs.int8()])
def test_steps_whose_buckets_are_not_told_still_say_what_compression_took(
    run: Run, tmp_path: Path, compressor: Any
) -> None:
    for trace in traced(run, tmp_path, gs.Plan(compress=compressor), 70).values():
        brief = [step for step in trace.steps if step.buckets is None]
        assert 10 < len(brief) < 20, "of the steps after the fiftieth one in ten is detailed"
        for step in brief:
            assert (step.header, step.gradients) == (None, None)
            assert (step.encode_s > 0, step.decode_s > 0) == (compressor is not None,) * 2


@pytest.mark.parametrize("pace", [gs.gossip(), gs.async_sgd(0)])
def test_waiting_without_collectives_is_no_input(run: Run, tmp_path: Path, pace: Any) -> None:
    """After the optimizer's step; what is waited there for neighbours or owners would else count as input."""
    for trace in traced(run, tmp_path, gs.Plan(pace=pace)).values():
        for step in trace.steps[1:]:
            assert [phase.name for phase in step.phases if phase.name != "optimizer"] == ["wait", *PHASES[1:-1]]
            assert step.exposed_s == pytest.approx(step.seconds("wait"), abs=2e-6)


def test_all_ranks_of_a_run_write_its_name(run: Run, tmp_path: Path) -> None:
    first, second = ({trace.run.id for trace in traced(run, tmp_path / name).values()} for name in "ab")
    assert len(first) == len(second) == 1
    assert first != second


def check_same_bits(folder: str) -> None:
    for plan in (gs.Plan(bucket_bytes=4096), gs.Plan(compress=gs.int8())):
        for ours, theirs in zip(train(folder, plan)[1], train(None, plan)[1], strict=True):
            assert torch.equal(ours, theirs)


def test_tracing_changes_no_bit(run: Run, tmp_path: Path) -> None:
    run(check_same_bits, str(tmp_path))


def test_input_is_exact_where_the_loader_is_ours(run: Run, tmp_path: Path) -> None:
    for trace in traced(run, tmp_path, None, STEPS, True).values():
        assert all(step.exact_input for step in trace.steps)
        taken = [step.seconds("input") for step in trace.steps]
        assert min(taken) >= LOADING_S
        assert median(taken) < LOGGING_S  # what comes between loader and forward is not input


def check_environment(folder: str) -> None:
    with patch.dict(os.environ, {"GRADSYNC_TRACE": folder}):
        train(None)


def test_the_environment_traces_without_a_change(run: Run, tmp_path: Path) -> None:
    run(check_environment, str(tmp_path / "env"))
    assert [len(trace.steps) for trace in read_run(tmp_path / "env").ranks.values()] == [STEPS, STEPS]


def check_two_models(folder: str) -> None:
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    syncs = [gs.attach(model, torch.optim.SGD(model.parameters(), 0.1), trace=folder) for model in models]
    for _ in range(3):
        for model in models:
            model(torch.full((2, 4), 1.0 + dist.get_rank())).sum().backward()
    for sync in syncs:
        sync.detach()


def test_two_models_have_two_traces(run: Run, tmp_path: Path) -> None:
    run(check_two_models, str(tmp_path))
    assert [len(read_run(folder).ranks[1].steps) for folder in (tmp_path, tmp_path / "model-2")] == [3, 3]


def check_one_traces(folder: str) -> None:
    train(folder if dist.get_rank() else None)


def test_one_rank_may_trace_alone(run: Run, tmp_path: Path) -> None:
    run(check_one_traces, str(tmp_path))
    assert list(read_run(tmp_path).ranks) == [1]
    assert read_run(tmp_path).missing == [0]


def check_dropped(folder: str) -> None:
    model = nn.Linear(4, 4)
    guard = gs.Guard(nonfinite="skip")
    sync = gs.attach(model, torch.optim.SGD(model.parameters(), 0.1), guard=guard, trace=folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(4):
            poison = float("nan") if (step, dist.get_rank()) == (2, 1) else 1.0
            model(torch.full((2, 4), poison + dist.get_rank())).sum().backward()
    sync.detach()


def test_a_skipped_step_and_its_cause_are_told(run: Run, tmp_path: Path) -> None:
    run(check_dropped, str(tmp_path))
    for trace in read_run(tmp_path).ranks.values():
        assert [step.counts for step in trace.steps] == [True, True, False, True]
        [found] = trace.health
        assert (found.step, found.what, found.ranks, found.parameter) == (2, "nonfinite", [1], "weight")


def check_clocks(hosts: list[str], folder: str) -> None:
    declare_host(hosts[dist.get_rank()])
    try:
        train(folder, steps=2)
    finally:
        declare_host(None)


def test_clocks_of_hosts_are_compared_and_sockets_are_read(run: Run, tmp_path: Path) -> None:
    run(check_clocks, ["a", "b"], str(tmp_path))
    for trace in read_run(tmp_path).ranks.values():
        # Both are really one machine: the truth is known.
        assert abs(trace.clocks[0].offset_s) <= trace.clocks[0].error_s + 1e-6
    assert read_run(tmp_path).ranks[0].clocks[0].error_s == 0


def test_clocks_are_off_by_no_more_than_the_error() -> None:
    truth, travel = 7.0, (0.004, 0.001)
    rounds, now, received = [], 0.0, (0.0, 0.0)
    for _ in range(5):
        sent = (now, now - truth + 0.0005)
        rounds.append([(sent[0], received[0]), (sent[1], received[1])])
        received = (sent[1] + truth + travel[0], sent[0] - truth + travel[1])
        now += 0.01
    found = estimate(rounds, 1)
    assert abs(found.offset_s - truth) <= found.error_s
    assert found.error_s <= sum(travel)
    assert estimate(rounds, 0) == ClockOffset(pytest.approx(0.0, abs=0.01), pytest.approx(0.0, abs=0.01))


def test_a_trace_that_is_no_path_is_refused() -> None:
    with pytest.raises(TypeError, match="trace must be the path of a folder, got 3"):
        gs.attach(nn.Linear(2, 2), trace=3)  # type: ignore[arg-type]


def check_spans() -> list[str]:
    model = nn.Linear(4, 4)
    sync = gs.attach(model, torch.optim.SGD(model.parameters(), 0.1))
    batch = torch.full((2, 4), 1.0 + dist.get_rank())
    model(batch).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        model(batch).sum().backward()
    sync.detach()
    return [event.key for event in profiler.key_averages() if event.key.startswith("gradsync")]


def test_the_profiler_shows_our_spans_by_name(run: Run) -> None:
    for names in run(check_spans):
        assert {"gradsync: launch bucket 0", "gradsync: wait bucket 0", "gradsync: wait for the header"} <= {*names}


WIDTH = 256


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def as_hosts(train: Callable[[], None]) -> None:
    """Each rank takes itself for a host of its own: what it sends goes over a network."""
    declare_host("ab"[dist.get_rank()])
    try:
        train()
    finally:
        declare_host(None)


def check_switches(folder: str) -> None:
    def train() -> None:
        plans = (gs.Plan(compress=gs.bf16(), bucket_bytes=1 << 18), gs.Plan(bucket_bytes=1 << 16))
        with choosing(*plans), off(True), overhearing():
            auto = gs.auto(cluster=cluster(), steps=2, recheck_every=30)
            run = Training(auto, wide_mlp, trace=folder)
            run.train(range(70))
            run.sync.detach()

    as_hosts(train)


def wide_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def test_what_is_sent_is_right_in_every_step_of_a_run_that_switches(run: Run, tmp_path: Path) -> None:
    """Profiling, the first choice, profiling again, the second; the first synchronization of all is exact."""
    run(check_switches, str(tmp_path))
    for trace in read_run(tmp_path).ranks.values():
        raw = sum(4 * torch.Size(shape).numel() for _, shape, _ in trace.run.parameters)
        halved = range(trace.choices[0].step, trace.choices[0].step + 30)
        assert [choice.step for choice in trace.choices] == [3, 36]
        assert len(trace.steps) == 70
        for step in trace.steps:
            expected = raw // 2 if step.step in halved else raw
            assert (step.nbytes, step.sent_nbytes, step.raw_nbytes) == (expected, expected, raw), step.step
        # Since when which buckets; the links are still looked at.
        assert [(layout.step, layout.buckets[0].compressor) for layout in trace.layouts][:2] == [(0, None), (3, "bf16")]
        assert {layout.step for layout in trace.layouts} >= {0, 3, 33, 36}
        assert {wire.peer for line in trace.socket_lines if line.step >= 36 for wire in line.wires} == {
            1 - trace.run.rank
        }


def check_warmup(folder: str) -> None:
    def train() -> None:
        model = wide()
        plan = gs.Plan(compress=gs.warmup(gs.bf16(), steps=4))
        sync = gs.attach(model, torch.optim.SGD(model.parameters(), 0.01), plan, trace=folder)
        for step in range(10):
            if step == 7:
                for param in model[0].parameters():
                    param.requires_grad_(False)
            model(torch.full((2, WIDTH), 1.0 + dist.get_rank())).square().mean().backward()
        sync.detach()

    as_hosts(train)


def test_what_is_sent_follows_a_warm_up_and_frozen_layers_at_once(run: Run, tmp_path: Path) -> None:
    run(check_warmup, str(tmp_path))
    layer = 4 * (WIDTH * WIDTH + WIDTH)
    for trace in read_run(tmp_path).ranks.values():
        told = [(step.sent_nbytes, step.raw_nbytes) for step in trace.steps]
        # Frozen is what no rank trains in its header: the step in which it is heard still carries zeros.
        assert told == 4 * [(2 * layer, 2 * layer)] + 4 * [(layer, 2 * layer)] + 2 * [(layer // 2, layer)]
        assert [layout.step for layout in trace.layouts] == [0, 8]


def check_resume(folder: str) -> None:
    state: dict[str, torch.Tensor] = {}
    for part in (1, 2):
        model = nn.Linear(4, 4)
        sync = gs.attach(model, torch.optim.SGD(model.parameters(), 0.01), trace=folder)
        if state:
            sync.load_state_dict(state)
        for step in range(5):
            loss = model(torch.full((2, 4), 1.0 + dist.get_rank())).sum()
            last = read_flight(Path(folder) / f"rank-{dist.get_rank()}.flight")[-1]
            assert (last.moment, last.step) == (Moment.FORWARD, 5 * (part - 1) + step)
            loss.backward()
        state = sync.state_dict()
        sync.detach()


def test_a_resumed_run_counts_on_from_its_first_step(run: Run, tmp_path: Path) -> None:
    """Before it had ended one, its flight record and its errors spoke of step 0."""
    run(check_resume, str(tmp_path))
    read = read_run(tmp_path)
    assert [earlier.steps for earlier in read.earlier] == [[0, 4]]
    for trace in read.ranks.values():
        assert [step.step for step in trace.steps] == [5, 6, 7, 8, 9]
        assert len(trace.earlier) == 1


def exit_attached(folder: str, error: BaseException | None) -> None:
    """As a process that ends with the model attached, after an error that nobody caught."""
    handlers: list[Callable[[], None]] = []
    exits = SimpleNamespace(register=handlers.append, unregister=handlers.remove)
    with patch("gradsync.engine.trace_step.atexit", exits):
        sync = gs.attach(nn.Linear(2, 2), trace=folder)
        [handler] = handlers
        with patch.object(sys, "last_value", error, create=True):
            handler()
        assert not handlers
    sync.detach()


@pytest.mark.parametrize("error", [None, ArithmeticError("no such batch")])
def test_a_process_that_ends_attached_says_why(run: Run, tmp_path: Path, error: BaseException | None) -> None:
    run(exit_attached, str(tmp_path), error)
    for trace in read_run(tmp_path).ranks.values():
        assert trace.end is not None
        assert trace.end.why == ("exit" if error is None else "exception")
        assert [(each.what, each.text) for each in trace.errors] == (
            [] if error is None else [("ArithmeticError", "no such batch")]
        )
