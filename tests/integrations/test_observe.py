"""`gs.observe`: a stock DDP model is traced and checked, and trains the very same weights."""

from __future__ import annotations

import copy
import gc
import io
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

import gradsync as gs
from gradsync.integrations.bucket_launches import BucketLaunches
from gradsync.trace.reader import read_run

Run = Callable[..., list[Any]]
STEPS = 5


def wrapped(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    return DistributedDataParallel(model, bucket_cap_mb=0.01, **options)


def train(ddp: DistributedDataParallel, steps: int = STEPS) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(ddp.parameters())
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        with ddp.no_sync() if step == 2 else warnings.catch_warnings():
            ddp(torch.randn(4, 64, generator=generator)).square().mean().backward()
        if step != 2:
            optimizer.step()
            optimizer.zero_grad()
    return [param.detach().clone() for param in ddp.parameters()]


def check_same_bits(folder: str) -> None:
    for number, options in enumerate([{}, {"gradient_as_bucket_view": True}, {"static_graph": True}]):
        plain = train(wrapped(**options))
        ddp = wrapped(**options)
        observer = gs.observe(ddp, trace=f"{folder}/{number}")
        ours = train(ddp)
        observer.close()
        assert all(torch.equal(one, two) for one, two in zip(ours, plain, strict=True)), options


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_observed_model_trains_the_same_bits(run: Run, tmp_path: Path, ranks: int) -> None:
    run(check_same_bits, str(tmp_path), ranks=ranks)
    for number in range(3):
        traces = read_run(tmp_path / str(number)).ranks
        assert sorted(traces) == [*range(ranks)]
        for trace in traces.values():
            assert trace.run.source == "ddp"
            assert len(trace.steps) == STEPS - 1  # one was under no_sync()
            last = trace.steps[-1]
            assert [phase.name for phase in last.phases] == ["optimizer", "input", "forward", "backward", "wait"]
            assert sorted(index for bucket in trace.layouts[-1].buckets for index in bucket.parameters) == [*range(6)]
            assert last.buckets
            assert all(bucket.launched <= bucket.wait_to for bucket in last.buckets)  # type: ignore[operator]
            assert last.nbytes == sum(bucket.nbytes for bucket in last.buckets)
            assert trace.health == []


def check_own_hook(folder: str) -> dict[str, Any]:
    ddp = wrapped()
    observer = gs.observe(ddp, trace=folder)
    ddp.register_comm_hook(None, fp16_compress_hook)
    train(ddp)
    stats = observer.stats()
    observer.close()
    return stats


def test_a_hook_of_the_user_stays_and_the_rest_is_seen(run: Run, tmp_path: Path) -> None:
    for stats in run(check_own_hook, str(tmp_path)):
        assert stats["steps"] == STEPS - 1
    step = read_run(tmp_path).ranks[0].steps[-1]
    assert step.buckets is not None
    assert all(bucket.done is None for bucket in step.buckets), "when a sum is done only a hook would know"
    assert (step.nbytes, step.sent_nbytes) == (0, 0), "what it sends is its own affair"
    assert step.gradients is not None
    assert step.exposed_s > 0


def check_drift(folder: str) -> list[str]:
    ddp = wrapped()
    observer = gs.observe(ddp, trace=folder, guard=gs.Guard(nonfinite="skip"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(ddp, 4)
        if dist.get_rank() == 1:
            list(ddp.parameters())[2].data.view(torch.int32)[3, 5] ^= 1 << 20
        train(ddp, 66)
        poison = float("nan") if dist.get_rank() == 2 else 1.0
        for _ in range(3):
            ddp(torch.full((4, 64), poison)).square().mean().backward()
            ddp.zero_grad()
            poison = 1.0
    observer.close()
    return [str(each.message) for each in caught]


def test_drift_and_nan_are_named(run: Run, tmp_path: Path) -> None:
    for told in run(check_drift, str(tmp_path), ranks=3):
        drift = [each for each in told if "the replicas differ" in each]
        assert len(drift) == 1
        assert 'parameter "2.weight"' in drift[0]
        assert "rank 1" in drift[0]
        assert any("rank 2 has NaN or Inf in the gradient of" in each for each in told)
    for trace in read_run(tmp_path).ranks.values():
        assert [(each.what, each.ranks) for each in trace.health] == [("drift", [1]), ("nonfinite", [2])]


def check_join(folder: str) -> None:
    ddp = wrapped()
    observer = gs.observe(ddp, trace=folder)
    with ddp.join():
        train(ddp, 3 + 2 * dist.get_rank())
    observer.close()


def test_ranks_may_join(run: Run, tmp_path: Path) -> None:
    run(check_join, str(tmp_path))
    assert all(trace.steps for trace in read_run(tmp_path).ranks.values())


def test_only_ddp_is_observed() -> None:
    with pytest.raises(TypeError, match=r"takes a DistributedDataParallel, got Linear; .* gs\.attach"):
        gs.observe(nn.Linear(2, 2))  # type: ignore[arg-type]


def observe_on_some(coming: list[int]) -> tuple[list[torch.Tensor], list[str], dict[str, Any]]:
    plain = train(wrapped())
    ddp = wrapped()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        observer = gs.observe(ddp, guard=gs.Guard(nonfinite="skip", timeout=2)) if dist.get_rank() in coming else None
        ours = train(ddp)
    stats = {} if observer is None else observer.stats()
    if observer is not None:
        observer.close()
    assert all(torch.equal(one, two) for one, two in zip(ours, plain, strict=True))
    return ours, [str(each.message) for each in caught], stats


@pytest.mark.parametrize(("coming", "ranks"), [([0], 2), ([1], 2), ([0], 3), ([1, 2], 3)])
def test_observed_on_some_ranks_only_it_trains_on_and_says_who_did_not_come(
    run: Run, coming: list[int], ranks: int
) -> None:
    missing = [str(rank) for rank in range(ranks) if rank not in coming]
    for rank, (_, said, stats) in enumerate(run(observe_on_some, coming, ranks=ranks)):
        if rank not in coming:
            assert (said, stats) == ([], {})
            continue
        [text] = said
        assert f"{' and '.join(missing)} did not come" in text
        assert stats["steps"] == STEPS - 1
        assert stats["exposed_s"] > 0  # what this rank sees by itself


def observe_once_more(folder: str) -> None:
    """Rank 0 was alone the first time; then all come."""
    first = wrapped()
    if dist.get_rank() == 0:
        with pytest.warns(UserWarning, match="rank 1 did not come"):
            gs.observe(first, guard=gs.Guard(timeout=2))
    train(first)
    second = wrapped()
    observer = gs.observe(second, trace=folder)
    train(second)
    observer.close()


def test_who_did_not_come_once_may_come_the_next_time(run: Run, tmp_path: Path) -> None:
    run(observe_once_more, str(tmp_path))
    assert [len(trace.steps) for trace in read_run(tmp_path).ranks.values()] == [STEPS - 1] * 2


STRANGER = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(os.environ["RANK"]), world_size=2)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    if os.environ.get("FAULT") and dist.get_rank() == 1 and step == 3:
        raise RuntimeError("a bug in the training loop")
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", flush=True)
if os.environ.get("QUIT"):
    os._exit(0)  # gloo's own threads may abort a process that ends in good order
dist.destroy_process_group()
"""


@pytest.mark.parametrize("traced", [0, 1])
@pytest.mark.parametrize("strictly", [False, True])
def test_a_script_that_is_traced_on_one_rank_only_trains_on(tmp_path: Path, traced: int, strictly: bool) -> None:
    """One host's job script exports the variable, the other's does not; and warnings may be errors."""
    script = tmp_path / "train.py"
    script.write_text(STRANGER)
    ranks = []
    for rank in range(2):
        own = {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo", "QUIT": "1"}
        own |= {"GRADSYNC_TRACE": str(tmp_path / "run")} if rank == traced else {}
        command = [sys.executable, *(["-W", "error::UserWarning"] if strictly else []), str(script)]
        command.append(str(tmp_path / "store"))
        ranks.append(
            subprocess.Popen(command, env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    told = [rank.communicate(timeout=90) for rank in ranks]
    said = [text for _, text in told]
    assert [text for text, _ in told] == ["trained\n"] * 2, said
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert said[traced].count(f"rank {1 - traced} did not come") == 1
    assert "gradsync" not in said[1 - traced]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("fault", ["", "1"])
def test_a_script_that_knows_nothing_of_us_is_traced_by_the_environment(tmp_path: Path, fault: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(STRANGER)
    ranks = []
    for rank in range(2):
        own = {"RANK": str(rank), "GRADSYNC_TRACE": str(tmp_path / "run"), "FAULT": fault, "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, str(script), str(tmp_path / "store")]
        ranks.append(subprocess.Popen(command, env=os.environ | own, stderr=subprocess.PIPE, text=True))
    said = [rank.communicate(timeout=90)[1] for rank in ranks]
    traces = read_run(tmp_path / "run").ranks
    if not fault:
        assert [rank.returncode for rank in ranks] == [0, 0], said
        assert [len(trace.steps) for trace in traces.values()] == [4, 4]
        assert all(trace.end is not None and trace.end.why == "exit" for trace in traces.values())
    else:
        [error] = traces[1].errors
        assert (error.what, error.text) == ("RuntimeError", "a bug in the training loop")
        assert len(traces[1].steps) == 3


def check_sharded_optimizer(folder: str) -> None:
    """Every rank holds another part of the state, by design."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = wrapped()
    observer = gs.observe(ddp, trace=folder)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3)
    for _ in range(6):
        ddp(torch.full((4, 64), 1.0 + dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    observer.close()


def test_an_optimizer_in_parts_is_no_drift(run: Run, tmp_path: Path) -> None:
    run(check_sharded_optimizer, str(tmp_path))
    assert all(trace.health == [] for trace in read_run(tmp_path).ranks.values())


def copy_and_save(folder: str) -> None:
    """As scripts do that average weights, or save the wrapper whole."""
    ddp = wrapped()
    observer = gs.observe(ddp, trace=folder)
    train(ddp)
    twin = copy.deepcopy(ddp)
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), ddp.parameters(), strict=True))
    saved = io.BytesIO()
    torch.save(ddp, saved)
    steps = observer.stats()["steps"]
    train(twin, steps=2)
    assert observer.stats()["steps"] == steps, "the copy is not observed"
    assert observer.stats()["sent_nbytes"] == observer.stats()["nbytes"] > 0  # 2 (n - 1) / n of it with two ranks
    observer.close()


def test_an_observed_model_can_be_copied_and_saved(run: Run, tmp_path: Path) -> None:
    run(copy_and_save, str(tmp_path))


def check_part_of_the_ranks(folder: str) -> None:
    both, alone = dist.new_group([1, 2]), dist.new_group([0])
    rank = dist.get_rank()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(64, 8), process_group=both if rank else alone)
    observer = gs.observe(ddp, trace=folder)
    train(ddp)
    observer.close()


def test_ranks_that_train_apart_have_traces_of_their_own(run: Run, tmp_path: Path) -> None:
    run(check_part_of_the_ranks, str(tmp_path), ranks=3)
    pair, alone = read_run(tmp_path / "ranks-1-to-2"), read_run(tmp_path / "ranks-0")
    assert (list(pair.ranks), pair.missing, pair.world_size) == ([1, 2], [], 2)
    assert (list(alone.ranks), alone.missing) == ([0], [])
    (tmp_path / "ranks-1-to-2" / "rank-2.jsonl").unlink()
    assert read_run(tmp_path / "ranks-1-to-2").missing == [2]
    with pytest.raises(ValueError, match=r"itself holds no trace, but .* below it: .*/ranks-0, .*/ranks-1-to-2"):
        read_run(tmp_path)


def drop_and_wrap_again(folder: str) -> None:
    torch.manual_seed(0)
    module = nn.Linear(64, 8)
    ddp = DistributedDataParallel(module)
    kept = gs.observe(ddp, trace=f"{folder}/0")
    with pytest.raises(ValueError, match=r"parameter weight is observed already; call close\(\) on its observer first"):
        gs.attach(module)
    train(ddp)
    del ddp
    gc.collect()
    second = DistributedDataParallel(module)  # though somebody still has the first observer
    observer = gs.observe(second, trace=f"{folder}/1")
    train(second)
    observer.close()
    kept.close()


def test_a_model_may_be_wrapped_again_when_its_wrapper_is_gone(run: Run, tmp_path: Path) -> None:
    run(drop_and_wrap_again, str(tmp_path))
    assert [len(read_run(tmp_path / name).ranks[1].steps) for name in "01"] == [STEPS - 1] * 2


def forget_everything(folder: str, how: str) -> None:
    """Nobody closes anything, and nothing is left: no parameters, no threads."""
    before = set(threading.enumerate())
    ddp = wrapped()
    if how == "hook":
        ddp.register_comm_hook(*gs.ddp_hook(gs.Plan(), ddp))
    else:
        gs.observe(ddp, trace=folder if how == "traced" else None)
    train(ddp)
    known = [weakref.ref(param) for param in ddp.parameters()]
    del ddp
    # Gloo's thread lets go of the last bucket in its time, and so does the beat's.
    deadline = time.monotonic() + 20
    while True:
        gc.collect()
        kept = sum(reference() is not None for reference in known)
        left = {t.name for t in set(threading.enumerate()) - before if t.name.startswith("gradsync")}
        if not kept and not left:
            break
        assert time.monotonic() < deadline, (kept, left)
        time.sleep(0.05)
    dist.barrier()


@pytest.mark.parametrize("how", ["hook", "silent", "traced"])
def test_what_nobody_has_any_more_is_gone(run: Run, tmp_path: Path, how: str) -> None:
    run(forget_everything, str(tmp_path), how)
    if how == "traced":
        assert [trace.end and trace.end.why for trace in read_run(tmp_path).ranks.values()] == ["dropped"] * 2


def replace_parameters(folder: str) -> list[str]:
    """On all ranks, so that DDP itself notices nothing."""
    ddp = wrapped()
    observer = gs.observe(ddp, trace=folder)
    train(ddp)
    fresh = {name: value + dist.get_rank() for name, value in ddp.module.state_dict().items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp.module.load_state_dict(fresh, assign=True)
        train(ddp, 66)
    observer.close()
    return [str(each.message) for each in caught]


def test_replaced_parameters_are_noticed_and_compared_from_then_on(run: Run, tmp_path: Path) -> None:
    for told in run(replace_parameters, str(tmp_path)):
        [text] = [each for each in told if "replaced after" in each]
        assert "6 parameters (0.weight, 0.bias, 2.weight and 3 more)" in text
        assert [each for each in told if "the replicas differ" in each], "the new ones are compared"
    for trace in read_run(tmp_path).ranks.values():
        assert [each.what for each in trace.health][:1] == ["replaced"]
        assert len(trace.steps) > 60


def move_parameters() -> None:
    """Pruned, a parameter has another name, and is the same."""
    ddp = wrapped()
    observer = gs.observe(ddp)
    train(ddp)
    prune.identity(ddp.module[0], "weight")
    train(ddp)
    assert observer.stats()["steps"] == 2 * (STEPS - 1)
    observer.close()


def test_a_parameter_that_moved_is_not_replaced(run: Run) -> None:
    run(move_parameters)


class Broken(Exception):
    pass


def watch_badly(folder: str) -> list[str]:
    """Something of ours fails in the middle of a backward of rank 1."""
    plain = train(wrapped(), 8)
    ddp = wrapped()
    observer = gs.observe(ddp, trace=folder)

    def fail(launches: BucketLaunches, index: int) -> None:
        raise Broken(f"parameter {index}")

    train(ddp, 2)
    broken = patch.object(BucketLaunches, "arrived", fail) if dist.get_rank() == 1 else nullcontext()
    with broken, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        twin = wrapped()
        ddp.load_state_dict(twin.state_dict())
        ours = train(ddp, 8)
    observer.close()
    assert all(torch.equal(one, two) for one, two in zip(ours, plain, strict=True))
    return [str(each.message) for each in caught]


def test_what_fails_in_an_observer_ends_the_observer_only(run: Run, tmp_path: Path) -> None:
    others, own = run(watch_badly, str(tmp_path))
    assert len(own) == 1
    assert "no longer observed, and trains on: Broken('parameter 5')" in own[0]
    assert len(others) == 1
    assert "replicas are no longer compared" in others[0]


LOADER = """
import sys
sys.modules["gradsync"] = None
import torch
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
ddp = torch.load(sys.argv[1], weights_only=False)
ddp(torch.ones(2, 64)).sum().backward()
torch.distributed.destroy_process_group()
"""


def save_whole(folder: str) -> None:
    ddp = wrapped()
    observer = gs.observe(ddp)
    train(ddp)
    if dist.get_rank() == 0:
        torch.save(ddp, f"{folder}/whole.pt")
    observer.close()


def test_a_model_that_was_saved_whole_is_loaded_without_gradsync(run: Run, tmp_path: Path) -> None:
    run(save_whole, str(tmp_path))
    command = [sys.executable, "-c", LOADER, str(tmp_path / "whole.pt")]
    loaded = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    )
    assert loaded.returncode == 0, loaded.stderr


def check_hook_of_the_first_forward() -> None:
    """As DDP itself does for optimizers that step inside of backward."""
    ddp = wrapped()
    lazily = ddp._lazy_init

    def with_hook() -> None:
        lazily()
        ddp.register_comm_hook(None, fp16_compress_hook)

    ddp._lazy_init = with_hook
    observer = gs.observe(ddp)
    train(ddp)
    assert observer.stats()["steps"] == STEPS - 1
    observer.close()


def test_a_hook_that_comes_with_the_first_forward_stays(run: Run) -> None:
    run(check_hook_of_the_first_forward)
