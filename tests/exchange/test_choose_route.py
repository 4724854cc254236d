"""Every algorithm on every layout of hosts: the right sum, the same bits on every rank, and again."""

from __future__ import annotations

import re
import resource
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs
from gradsync.exchange.group_cache import group_cache
from gradsync.transport import lane as lane_module
from gradsync.transport.host_meeting import declare_host

ALGORITHMS: dict[str, Any] = {
    "None": None,
    "native": gs.native(),
    "ring": gs.ring(),
    "tree": gs.tree(),
    "halving_doubling": gs.halving_doubling(),
    "hierarchical": gs.hierarchical(),
    "shared_memory": gs.shared_memory(),
}
ONE_HOST = ((0, 1, 2, 3),)
LAYOUTS = {"one-host": ONE_HOST, "two-and-two": ((0, 1), (2, 3)), "one-and-three": ((0,), (1, 2, 3))}
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.complex64,
]
SIZES = (0, 1, 2, 37, 10007)
LARGE = 300_001


@contextmanager
def hosts(layout: tuple[tuple[int, ...], ...]) -> Iterator[None]:
    """This rank is where the layout says; the group is not used before."""
    [mine] = [index for index, host in enumerate(layout) if dist.get_rank() in host]
    declare_host(f"host-{mine}")
    try:
        yield
    finally:
        declare_host(None)


def values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    numel = LARGE if dtype == torch.float32 else SIZES[-1]
    generator = torch.Generator().manual_seed(rank)
    if not (dtype.is_floating_point or dtype.is_complex):
        info = torch.iinfo(dtype)
        return torch.randint(info.min // 8, info.max // 8, (numel,), generator=generator, dtype=dtype)
    return torch.randn(numel, generator=generator, dtype=torch.complex64 if dtype.is_complex else None).to(dtype)


def bits(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.view(torch.uint8).numpy().tobytes())


def check_sum(found: torch.Tensor, rows: list[torch.Tensor], case: object) -> None:
    if not (found.is_floating_point() or found.is_complex()):
        assert torch.equal(found, torch.stack(rows).sum(0, dtype=found.dtype)), case
        return
    wide = torch.complex128 if found.is_complex() else torch.float64
    # Every addition rounds once, of partial sums that are not larger than the sum of magnitudes.
    bound = len(rows) * torch.finfo(found.dtype).eps * sum(row.to(wide).abs() for row in rows) + 1e-30
    error = (found.to(wide) - torch.stack([row.to(wide) for row in rows]).sum(0)).abs()
    assert bool((error <= bound).all()), case


def reduce_everything(layout: tuple[tuple[int, ...], ...]) -> dict[str, int]:
    found = {}
    names = [name for name in ALGORITHMS if name != "shared_memory" or layout == ONE_HOST]
    with hosts(layout):
        for dtype in DTYPES:
            rows = [values(rank, dtype) for rank in range(dist.get_world_size())]
            for size in (*SIZES, *([LARGE] if dtype == torch.float32 else [])):
                for name in names:
                    case = f"{name} {dtype} {size}"
                    mine = rows[dist.get_rank()][:size]
                    first = gs.all_reduce(mine.clone(), algorithm=ALGORITHMS[name], op="sum")
                    check_sum(first, [row[:size] for row in rows], case)
                    found[case] = bits(first)
                    if size == 10007:
                        second = gs.all_reduce(mine.clone(), algorithm=ALGORITHMS[name], op="sum")
                        assert bits(second) == bits(first), f"{case} differs in a second run"
        lane = group_cache(dist.group.WORLD).lane  # type: ignore[arg-type]
        assert lane.hosts == layout
        assert lane.one_host == (layout == ONE_HOST)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_algorithm_and_dtype_gives_the_sum_and_the_same_bits_everywhere(
    layout: str, run: Callable[..., Any]
) -> None:
    found = run(reduce_everything, LAYOUTS[layout], ranks=4, timeout=100)
    for each in found[1:]:
        assert each == found[0]


def test_no_algorithm_changes_the_bits_of_whole_numbers(run: Callable[..., Any]) -> None:
    """Integers and fp32 sums of two ranks do not depend on the order: all ways must agree."""
    found = run(reduce_two, ranks=2)
    assert found[0] == found[1]
    assert all(len(set(each)) == 1 for each in found[0])


def reduce_two() -> list[list[int]]:
    found = []
    with hosts(((0, 1),)):
        for dtype in (torch.float32, torch.int64, torch.bfloat16):
            mine = values(dist.get_rank(), dtype)[:10007]
            sums = [gs.all_reduce(mine.clone(), algorithm=a, op="sum") for a in ALGORITHMS.values()]
            found.append([bits(each) for each in sums])
    return found


# What does not fit


def ask_for_shared_memory_between_hosts() -> tuple[str, str, list[float]]:
    with hosts(((0, 1), (2, 3))):
        said = [_refusal(lambda: gs.all_reduce(torch.ones(3), algorithm=gs.shared_memory())) for _ in range(2)]
        assert said[0] == said[1]
        model = nn.Linear(2, 2)
        attaching = _refusal(lambda: gs.attach(model, plan=gs.Plan(algorithm=gs.shared_memory())))
        after = gs.all_reduce(torch.ones(2), op="sum").tolist()
        gs.attach(model).detach()
    return said[0], attaching, after


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing"


def test_shared_memory_between_hosts_is_refused_on_every_rank_and_the_group_still_works(
    run: Callable[..., Any],
) -> None:
    sentence = (
        "gs.shared_memory() is for the ranks of one host, but this group spans 2; "
        "use gs.hierarchical(), which uses shared memory inside each"
    )
    assert run(ask_for_shared_memory_between_hosts, ranks=4) == [(sentence, sentence, [4.0, 4.0])] * 4


# What a machine lacks


def reduce_without_library(lacking: int) -> dict[str, Any]:
    """As on a machine without a compiler: there the library is not found."""
    original = lane_module.load
    if dist.get_rank() == lacking:
        lane_module.load = lambda: None  # type: ignore[assignment]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sums = [gs.all_reduce(values(dist.get_rank(), torch.float32)[:size], op="sum") for size in (1, 37, 10007)]
        refused = _refusal(lambda: gs.all_reduce(torch.ones(3), algorithm=gs.shared_memory()))
        try:
            gs.shared_empty(3)
            no_memory = "nothing"
        except gs.GradSyncError as error:
            no_memory = str(error)
        after = gs.all_reduce(torch.ones(2), op="sum").tolist()
    finally:
        lane_module.load = original
    for each in sums:
        check_sum(each, [values(rank, torch.float32)[: each.numel()] for rank in range(3)], each.numel())
    return {
        "warned": [str(warning.message) for warning in caught],
        "refused": refused,
        "shared_empty": no_memory,
        "after": after,
        "bits": [bits(each) for each in sums],
    }


def test_without_the_library_the_process_group_serves_and_says_so(run: Callable[..., Any]) -> None:
    found = run(reduce_without_library, 1, ranks=3)
    lacks = "gradsync's C library was not built on rank 1 (install a C compiler, then gradsync again)"
    for each in found:
        assert each["warned"] == [f"{lacks}; the process group serves instead of shared memory"]
        assert each["refused"] == f"gs.shared_memory() is not offered: {lacks}"
        assert each["shared_empty"] == f"there is no shared memory here: {lacks}; use a plain tensor"
        assert each["after"] == [3.0, 3.0]
        assert each["bits"] == found[0]["bits"]


def reduce_without_memory(lacking: int) -> tuple[list[str], list[str], list[int]]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == lacking:
        resource.setrlimit(resource.RLIMIT_FSIZE, (512 << 10, before[1]))
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sums = [gs.all_reduce(values(dist.get_rank(), torch.float32)[:size], op="sum") for size in (1, 37, 10007)]
        with warnings.catch_warnings(record=True) as asked:
            warnings.simplefilter("always")
            gs.all_reduce(torch.ones(3), algorithm=gs.shared_memory())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for each in sums:
        check_sum(each, [values(rank, torch.float32)[: each.numel()] for rank in range(3)], each.numel())
    return [str(w.message) for w in caught], [str(w.message) for w in asked], [bits(each) for each in sums]


def test_without_memory_for_the_arena_the_process_group_serves_and_says_how_much_it_takes(
    run: Callable[..., Any],
) -> None:
    found = run(reduce_without_memory, 2, ranks=3)
    for rank, (warned, asked, sums) in enumerate(found):
        [sentence] = warned
        assert asked == warned
        assert re.match(r"gradsync needs \d+\.\d MB of shared memory ", sentence), sentence
        assert ("cannot be reserved (File too large)" if rank == 2 else "but rank 2 has not got it") in sentence
        assert sentence.endswith("; the process group serves instead of shared memory")
        assert sums == found[0][2]


# Training


def train(algorithm: str | None, steps: int = 3) -> list[torch.Tensor]:
    """The weights after every step; by DDP where no algorithm is named."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 40), nn.Tanh(), nn.Linear(40, 130), nn.Tanh(), nn.Linear(130, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sync = None
    forward: nn.Module = model
    if algorithm is None:
        forward = DistributedDataParallel(model)
    else:
        plan = gs.Plan(bucket_bytes=4096, algorithm=ALGORITHMS[algorithm])
        sync = gs.attach(model, optimizer, plan)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    weights = []
    for _ in range(steps):
        optimizer.zero_grad()
        forward(torch.randn(5, 7, generator=generator)).square().mean().backward()
        optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    if sync is not None:
        sync.detach()
    return weights


def train_every_way(layout: tuple[tuple[int, ...], ...]) -> dict[str, list[int]]:
    found = {}
    with hosts(layout):
        ddp = train(None)
        for name in ALGORITHMS:
            if name == "shared_memory" and len(layout) > 1:
                continue
            ours = train(name)
            for step, (mine, theirs) in enumerate(zip(ours, ddp, strict=True)):
                if dist.get_world_size() == 2:
                    assert torch.equal(mine, theirs), (name, step)
                else:
                    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=f"{name} in step {step}")
            found[name] = [bits(weights) for weights in ours]
            # Between hosts None goes by a measurement, which may choose another way in another run.
            if name in ("shared_memory", "hierarchical", "ring") or (name == "None" and len(layout) == 1):
                assert found[name] == [bits(weights) for weights in train(name)], f"{name} differs in a second run"
    return found


@pytest.mark.parametrize("layout", [((0, 1),), ((0,), (1,)), ONE_HOST, ((0,), (1, 2, 3))], ids=repr)
def test_training_with_every_algorithm_equals_ddp(layout: tuple[tuple[int, ...], ...], run: Callable[..., Any]) -> None:
    found = run(train_every_way, layout, ranks=sum(map(len, layout)))
    for each in found[1:]:
        assert each == found[0]
