"""What strangers found about gs.all_reduce, a story each."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist

import gradsync as gs
from gradsync.exchange.group_cache import group_cache
from gradsync.transport.host_meeting import declare_host


def bring_other_strides() -> list[float]:
    """A rank with a transposed tensor once made two operations where the others made one."""
    there = torch.ones(4, 3).t() if dist.get_rank() else torch.ones(3, 4)
    return [float(gs.all_reduce(there, op="sum").unique()) for _ in range(2)]


def test_ranks_may_bring_the_same_shape_with_other_strides(run: Any) -> None:
    assert run(bring_other_strides, ranks=3) == [[3.0, 9.0]] * 3


def be_refused() -> tuple[str, list[float], float]:
    """The mean was divided before the algorithm was found not to fit: a caller who fell back averaged halves."""
    declare_host("a" if dist.get_rank() else "b")
    tensor = torch.full((4,), 8.0)
    try:
        gs.all_reduce(tensor, algorithm=gs.shared_memory())
        said = "nothing"
    except ValueError as error:
        said = str(error)
    declare_host(None)
    return said, tensor.tolist(), float(gs.all_reduce(tensor).mean())


def test_a_call_that_is_refused_changes_nothing(run: Any) -> None:
    for said, values, mean in run(be_refused):
        assert said.startswith("gs.shared_memory() is for the ranks of one host, but this group spans 2;")
        assert (values, mean) == ([8.0] * 4, 8.0)


def begin_in_threads() -> list[float]:
    """Each of several threads once made connections of its own for the first call, and none met its match."""
    found: list[float] = []

    def call() -> None:
        found.append(float(gs.all_reduce(torch.ones(100), op="sum")[0]))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_several_threads_may_make_the_first_call(run: Any) -> None:
    assert run(begin_in_threads) == [[2.0] * 4] * 2


def bring_what_has_no_backend() -> tuple[str, float]:
    """It once broke every later call."""
    try:
        gs.all_reduce(torch.ones(3, device="meta"))
        said = "nothing"
    except ValueError as error:
        said = str(error)
    return said, float(gs.all_reduce(torch.ones(1), op="sum"))


def test_a_device_without_a_backend_is_refused_and_the_next_call_works(run: Any) -> None:
    sentence = "this process group has no backend for meta tensors; move the tensor, or add one"
    assert run(bring_what_has_no_backend) == [(sentence, 2.0)] * 2


def interrupt() -> str:
    """A call after one that was interrupted once blamed the network."""
    gs.all_reduce(torch.ones(1))
    dist.barrier()  # everybody has left it
    if dist.get_rank() == 0:
        return "fine"
    group_cache(dist.group.WORLD).lane.give_up(KeyboardInterrupt())  # type: ignore[arg-type]
    try:
        gs.all_reduce(torch.ones(1))
    except gs.GradSyncError as error:
        return str(error)
    return "nothing"


def test_after_giving_up_a_rank_says_so(run: Any) -> None:
    first, second = run(interrupt)
    assert first == "fine"
    assert "all_reduce cannot go on after an earlier call gave up (KeyboardInterrupt)" in second
