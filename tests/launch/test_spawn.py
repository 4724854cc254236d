"""Ranks as processes: values by rank, every traceback on failure, and nothing left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradsync as gs
from gradsync.launch.spawn import RankFailed, RankPool
from gradsync.transport.host_meeting import GroupMeeting


@pytest.fixture(scope="module")
def ranks(warm: ForkServerContext) -> Iterator[RankPool]:
    """A pool of our own: the tests here fail on purpose. Those that lose processes come last."""
    with RankPool(3, context=warm) as pool:
        yield pool


@pytest.fixture(autouse=True)
def _is_ours(pool: RankPool) -> None:
    """Our children may outlive a test, as those of the session's pool may."""


# What ranks run


def introduce(word: str) -> tuple[int, int, str]:
    assert dist.is_initialized()
    return dist.get_rank(), dist.get_world_size(), word


def count_threads() -> int:
    return torch.get_num_threads()


def add_up() -> float:
    tensor = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(tensor)
    return float(tensor)


def own_pid() -> int:
    return os.getpid()


def make_tensor() -> torch.Tensor:
    return torch.full((3,), float(dist.get_rank()))


def fail(on: int) -> None:
    if dist.get_rank() == on:
        raise KeyError(f"rank {on} has lost its key")


def fail_before_the_others_meet(on: int) -> float:
    fail(on)
    return add_up()


def leave_each_in_its_way() -> str:
    if dist.get_rank() == 1:
        os._exit(3)
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return "stayed"


def attach_where_one_is_killed() -> None:
    if dist.get_rank() == 1:
        GroupMeeting.hold = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    model = torch.nn.Linear(2, 2)
    gs.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


def wait_for_ever_in_a_named_place() -> None:
    threading.Event().wait()


def return_what_cannot_travel() -> Any:
    return threading.Lock()


def size_of(content: bytes) -> int:
    return len(content)


def stop_in_the_middle_of_the_answer() -> None:
    """As a rank that is frozen while it sends something large."""
    gc.unfreeze()  # what is frozen is not listed
    [own] = [each for each in gc.get_objects() if type(each) is Connection and not each.closed]
    os.write(own.fileno(), struct.pack("!i", 1 << 20) + b"the first bytes of many")
    os.kill(os.getpid(), signal.SIGSTOP)


@dataclass
class Batch:
    inputs: torch.Tensor
    more: dict[str, Any]


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, torch.nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, Batch):
        return tensors_in([value.inputs, value.more])
    return [tensor for each in (value.values() if isinstance(value, dict) else value) for tensor in tensors_in(each)]


def add_own_rank(value: Any) -> list[list[float]]:
    """To every tensor of an argument, in place; what they held, once every rank has done so, and then hold."""
    tensors = tensors_in(value)
    with torch.no_grad():
        before = [tensor.flatten().tolist() for tensor in tensors]
        dist.barrier()
        for tensor in tensors:
            tensor += dist.get_rank() + 1
        dist.barrier()
        return before + [tensor.flatten().tolist() for tensor in tensors]


def forms_and_sums(tensors: list[torch.Tensor]) -> list[tuple[Any, ...]]:
    return [
        (
            each.dtype,
            tuple(each.shape),
            each.layout,
            each.requires_grad,
            each.detach().to_dense().to(torch.complex64).abs().sum().item(),
        )
        for each in tensors
    ]


def write_through_a_view(whole: torch.Tensor, part: torch.Tensor, tied: torch.nn.Module) -> tuple[list[float], bool]:
    part += 10
    return whole.tolist(), tied.get_parameter("0.weight") is tied.get_parameter("1.weight")


def adopt() -> int:
    gs.init()
    return dist.get_world_size()


# What comes back


def test_every_rank_returns_its_value_in_order(ranks: RankPool) -> None:
    assert ranks.run(introduce, "hello", ranks=2) == [(0, 2, "hello"), (1, 2, "hello")]
    assert ranks.run(introduce, "alone", ranks=1) == [(0, 1, "alone")]


def test_ranks_share_a_group_that_works(ranks: RankPool) -> None:
    assert ranks.run(add_up, ranks=2) == [3.0, 3.0]


def test_processes_are_started_once(ranks: RankPool) -> None:
    assert ranks.run(own_pid, ranks=2) == ranks.run(own_pid, ranks=2)


def test_cores_are_shared_out(ranks: RankPool) -> None:
    cores = os.cpu_count() or 1
    assert ranks.run(count_threads, ranks=2) == [max(1, cores // 2)] * 2
    assert ranks.run(count_threads, ranks=1) == [cores]


def test_a_tensor_comes_back_whole(ranks: RankPool) -> None:
    assert [value.tolist() for value in ranks.run(make_tensor, ranks=2)] == [[0.0] * 3, [1.0] * 3]


def test_every_rank_has_tensor_arguments_of_its_own(ranks: RankPool) -> None:
    module = torch.nn.BatchNorm1d(2)
    module.num_batches_tracked = torch.tensor(0.0)
    nested = Batch(torch.zeros(3), {"list": [torch.zeros(2, 2)], "tuple": (torch.zeros(()), module)})
    for given in (torch.zeros(3), [torch.zeros(3)], (torch.zeros(3),), {"x": torch.zeros(3)}, module, nested):
        held = [tensor.flatten().tolist() for tensor in tensors_in(given)]
        sums = [[[number + rank for number in each] for each in held] for rank in (1, 2, 3)]
        assert ranks.run(add_own_rank, given) == [held + own for own in sums]
        assert [tensor.flatten().tolist() for tensor in tensors_in(given)] == held
        assert not any(tensor.is_shared() for tensor in tensors_in(given)), "memory of this process is moved nowhere"


def test_a_tensor_argument_of_any_form_arrives_as_it_is(ranks: RankPool) -> None:
    floats = (torch.float64, torch.bfloat16, torch.complex64)
    tensors = [torch.arange(6).to(dtype) for dtype in (torch.uint8, torch.bool, torch.int64, *floats)]
    tensors += [torch.ones(0), torch.ones(4, 3)[1:, ::2].t(), torch.ones(1).expand(5), torch.eye(3).to_sparse()]
    tensors += [torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2), requires_grad=False)]
    assert ranks.run(forms_and_sums, tensors) == [forms_and_sums(tensors)] * 3


def test_arguments_that_share_memory_share_it_on_each_rank(ranks: RankPool) -> None:
    whole, tied = torch.zeros(4), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    assert ranks.run(write_through_a_view, whole, whole[1:3], tied) == [([0.0, 10.0, 10.0, 0.0], True)] * 3
    assert whole.tolist() == [0.0] * 4


# What goes wrong


def test_a_function_without_a_name_is_refused_with_the_way_out(ranks: RankPool) -> None:
    before = ranks.run(own_pid, ranks=2)
    with pytest.raises(ValueError, match=r"cannot reach the ranks .*define it at the top of a module"):
        ranks.run(lambda: 1, ranks=2)
    with pytest.raises(ValueError, match="cannot reach the ranks"):
        ranks.run(introduce, threading.Lock(), ranks=2)
    assert ranks.run(own_pid, ranks=2) == before, "nothing was sent, so no process is lost"


@pytest.mark.parametrize("number", [0, -1, 4])
def test_a_pool_runs_as_many_ranks_as_it_has(ranks: RankPool, number: int) -> None:
    with pytest.raises(ValueError, match=f"this pool has 3 ranks, asked for {number}"):
        ranks.run(own_pid, ranks=number)


def test_a_pool_has_at_least_one_rank() -> None:
    with pytest.raises(ValueError, match="a pool needs at least 1 rank, got 0"):
        RankPool(0)


def test_a_value_that_cannot_travel_is_named(ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match="the value that return_what_cannot_travel returned cannot be sent back"):
        ranks.run(return_what_cannot_travel, ranks=1)


def test_a_rank_that_does_not_finish_shows_its_stacks(ranks: RankPool) -> None:
    ranks.run(own_pid, ranks=1)  # started again: the bound below is for the function alone
    (outcome,) = ranks.outcomes(wait_for_ever_in_a_named_place, ranks=1, timeout=1)
    assert not outcome.ok
    assert outcome.text.startswith("did not finish within 1 s; its stacks:")
    assert "wait_for_ever_in_a_named_place" in outcome.text


def test_a_rank_killed_between_runs_is_replaced(ranks: RankPool) -> None:
    _, victim = ranks.run(own_pid, ranks=2)
    os.kill(victim, signal.SIGKILL)
    next(child for child in multiprocessing.active_children() if child.pid == victim).join()
    assert ranks.run(add_up, ranks=2) == [3.0, 3.0]


def test_a_failing_rank_shows_every_ranks_traceback(ranks: RankPool) -> None:
    with pytest.raises(RankFailed) as caught:
        ranks.run(fail_before_the_others_meet, 1, ranks=2)
    said = str(caught.value)
    assert said.startswith("2 of 2 ranks failed: [0, 1]\n--- rank 0 ---\nTraceback")
    assert "rank 1 has lost its key" in said
    assert "in add_up" in said, "the rank that waited for it fails by itself and says where"


def test_a_pool_works_again_after_a_failure(ranks: RankPool) -> None:
    with pytest.raises(RankFailed, match="rank 0 has lost its key"):
        ranks.run(fail, 0)
    assert ranks.run(add_up) == [6.0] * 3


@pytest.mark.parametrize("start", ["forkserver", "spawn"])
def test_ranks_that_end_are_named_with_how(start: str, warm: ForkServerContext) -> None:
    with RankPool(3, context=warm if start == "forkserver" else None) as pool:
        first, second, third = pool.outcomes(leave_each_in_its_way, timeout=100)  # three fresh imports of torch
    assert (first.ok, first.value, first.text) == (True, "stayed", "returned")
    assert (second.ok, second.text) == (False, "the process exited with code 3")
    assert (third.ok, third.text) == (False, "the process was killed by SIGKILL")


def test_a_rank_killed_before_it_has_met_the_others_is_named(ranks: RankPool) -> None:
    """Nothing of it stands in the store; they would wait for it until the pool ends them."""
    first, second, third = ranks.outcomes(attach_where_one_is_killed)
    assert second.text == "the process was killed by SIGKILL"
    for outcome in [first, third]:  # the last to notice may find another ended that had noticed before
        assert re.search(r"PeerLost: .* of ranks? (0 and )?1( and 2)? ended before all had met", outcome.text)


@pytest.mark.timeout(60)
def test_a_rank_that_takes_nothing_in_is_ended_in_time(warm: ForkServerContext) -> None:
    with RankPool(2, context=warm) as pool:
        pool.run(add_up)
        os.kill(pool.pids()[1], signal.SIGSTOP)
        first, second = pool.outcomes(size_of, bytes(8 << 20), timeout=1)
        assert not first.ok or first.value == 8 << 20
        assert second.text.startswith("did not finish within 1 s")
        assert pool.run(size_of, bytes(8 << 20)) == [8 << 20] * 2


@pytest.mark.timeout(60)
def test_a_rank_that_stops_in_the_middle_of_its_answer_is_ended_in_time(warm: ForkServerContext) -> None:
    with RankPool(1, context=warm) as pool:
        pool.run(own_pid)
        [outcome] = pool.outcomes(stop_in_the_middle_of_the_answer, timeout=1)
        assert outcome.text.startswith("did not finish within 1 s")
        assert pool.run(introduce, "again") == [(0, 1, "again")]


# spawn


def test_spawn_gives_each_rank_a_tensor_of_its_own() -> None:
    given = torch.zeros(2)
    assert gs.spawn(add_own_rank, 2, given) == [[[0.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [2.0, 2.0]]]
    assert given.tolist() == [0.0, 0.0]


def test_spawn_returns_values_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    children, threads = set(multiprocessing.active_children()), threading.enumerate()
    assert gs.spawn(adopt, 1) == [1]
    assert set(multiprocessing.active_children()) <= children
    assert threading.enumerate() == threads
    assert list(tmp_path.iterdir()) == []


SCRIPT = """
import gradsync as gs

gs.init()

def work():
    return 1

if __name__ == "__main__":
    gs.spawn(work, 2)
"""


def test_a_script_that_makes_its_group_on_import_is_told_where_to_make_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert "the script made a process group when this rank imported it" in ran.stderr
    assert 'below `if __name__ == "__main__":`' in ran.stderr
