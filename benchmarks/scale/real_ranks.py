"""The control path among real ranks of this machine, eight to a host: processor time, messages and bytes, counted.

Wall time says nothing here: all ranks share two cores. Beside it what DDP does with `find_unused_parameters=True`, one
all-reduce of a number per parameter, and what gradsync did before: every rank's header to every rank.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

import gradsync as gs
from gradsync.agreement.header import Head, HeaderExchange, Headers, Mark, header_nbytes, merged, pack_header
from gradsync.transport.gloo_channel import GlooChannel
from gradsync.transport.host_meeting import declare_host
from gradsync.transport.lane import Lane, open_lane

PARAMETERS = 1000
STEPS, WARM = 40, 5


def take_part(per_host: int) -> dict[str, Any]:
    """One rank: the lane is opened, and headers are exchanged as steps do it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    declare_host(f"h{rank // per_host}")
    world = dist.group.WORLD
    assert world is not None
    begun, processor = time.perf_counter(), time.process_time()
    lane = open_lane(world, gs.Guard(), 300.0)
    lane.open_team(header_nbytes(PARAMETERS))  # as attach does it: headers go by shared memory inside a host
    attach = {"wall_s": time.perf_counter() - begun, "processor_s": time.process_time() - processor}
    counted = Counter[str]()
    count_calls(lane.groups.subgroups, counted)
    marks = bytearray([Mark.TRAINABLE | Mark.USED] * PARAMETERS)

    def header() -> None:
        head = Head(lane.step, 77, 1.0 + rank % 7, 1, -1, 1, 0, bytes(8), 0, 0, 77, b"replicas", 8.0, 1)
        received = HeaderExchange(lane, head, marks).receive()
        assert received.size == size
        lane.session.next_step()

    used = torch.ones(PARAMETERS, dtype=torch.int32)
    row, rows = torch.zeros(PARAMETERS + 88, dtype=torch.uint8), torch.zeros(size, PARAMETERS + 88, dtype=torch.uint8)

    def all_rows() -> None:
        dist.all_gather(list(rows), row)
        [bytes(each.numpy()) for each in rows]

    boards, lane._boards = lane._boards, None

    def by_boards() -> None:
        lane._boards = boards
        header()
        lane._boards = None

    arms = {
        "gradsync": by_boards,
        "gradsync without shared memory": header,
        "DDP, find_unused_parameters": lambda: dist.all_reduce(used),
        "every header to every rank": all_rows,
    }
    found: dict[str, Any] = {"attach": attach}
    for name, arm in arms.items():
        for _ in range(WARM):
            arm()
        dist.barrier()
        counted.clear()
        thread, processor = time.thread_time(), time.process_time()
        for _ in range(STEPS):
            arm()
        found[name] = {
            "thread_ms": 1e3 * (time.thread_time() - thread) / STEPS,
            "processor_ms": 1e3 * (time.process_time() - processor) / STEPS,
        }
        if name == "gradsync without shared memory":
            found["calls"] = counted["calls"] / STEPS
            found["nbytes"] = counted["nbytes"] / STEPS
        dist.barrier()
    found["apart"] = take_apart(lane, marks)
    lane.close(together=True)
    declare_host(None)
    return found


def take_apart(lane: Lane, marks: bytearray) -> dict[str, float]:
    """Medians over the steps of what the training thread does for a header, and of the same computation alone."""
    size, samples = lane.groups.size, dict[str, list[float]]()
    for _ in range(STEPS):
        head = Head(lane.step, 77, 1.0, 1, -1, 1, 0, bytes(8), 0, 0, 77, b"replicas", 8.0, 1)
        switches, slices = _switches(), 0
        begun = time.thread_time()
        header = HeaderExchange(lane, head, marks)
        launched = time.thread_time()
        landed = header.pending.landed

        def counting_slices(slice_s: float, landed: Callable[[float], bool] = landed) -> bool:
            nonlocal slices
            slices += slice_s > 0
            return landed(slice_s)

        header.pending.landed = counting_slices  # type: ignore[method-assign]
        assert header.receive().size == size
        received = time.thread_time()
        Headers(merged(pack_header(head, marks)[None])[None])  # nobody is waited for: what it costs the machine decides
        alone = time.thread_time()
        each = {
            "launch_ms": launched - begun, "wait_ms": received - launched, "alone_ms": alone - received,
        }  # fmt: skip
        for name, seconds in each.items():
            samples.setdefault(name, []).append(1e3 * seconds)
        samples.setdefault("slices", []).append(slices)
        samples.setdefault("switches", []).append(_switches() - switches)
        lane.session.next_step()
    dist.barrier()
    return {name: mean(each) if name in ("slices", "switches") else median(each) for name, each in samples.items()}


def _switches() -> int:
    used = resource.getrusage(resource.RUSAGE_THREAD)
    return used.ru_nvcsw + used.ru_nivcsw


def count_calls(subgroups: Any, counted: Counter[str]) -> None:
    """Count what goes into the channels of the subgroups from now on."""
    for _, channel in subgroups:
        for name in ("collect", "broadcast", "gather"):
            counting(channel, name, counted)


def counting(channel: GlooChannel, name: str, counted: Counter[str]) -> None:
    call = getattr(channel, name)

    def wrapped(*args: Any) -> Any:
        counted["calls"] += 1
        counted["nbytes"] += next(arg.numel() for arg in reversed(args) if isinstance(arg, torch.Tensor))
        return call(*args)

    setattr(channel, name, wrapped)


def measure(ranks: int, per_host: int = 8) -> dict[str, Any]:
    """Means over the ranks."""
    found = gs.spawn(take_part, ranks, per_host, timeout=400)
    arms = [name for name in found[0] if name not in ("attach", "calls", "nbytes", "apart")]
    return {
        "ranks": ranks,
        "per_host": per_host,
        "attach": {key: mean(each["attach"][key] for each in found) for key in found[0]["attach"]},
        "apart": {key: mean(each["apart"][key] for each in found) for key in found[0]["apart"]},
        "arms": {name: {key: mean(each[name][key] for each in found) for key in found[0][name]} for name in arms},
        "calls": {"mean": mean(each["calls"] for each in found), "most": max(each["calls"] for each in found)},
        "nbytes": {"mean": mean(each["nbytes"] for each in found), "most": max(each["nbytes"] for each in found)},
    }
