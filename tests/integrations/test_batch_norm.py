"""SyncBatchNorm on CPU ranks: the statistics, outputs and gradients of one process that has every rank's batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs
from gradsync.integrations.batch_norm import SyncBatchNorm, convert, revert

Run = Callable[..., list[Any]]

# What one dimension is, the layer for it, and how many samples each of two ranks has.
SHAPES: list[tuple[tuple[int, ...], type[nn.Module], tuple[int, int]]] = [
    ((), nn.BatchNorm1d, (4, 4)),
    ((5,), nn.BatchNorm1d, (3, 6)),
    ((4, 3), nn.BatchNorm2d, (1, 1)),
    ((2, 3, 2), nn.BatchNorm3d, (5, 0)),
    ((), nn.BatchNorm1d, (1, 1)),
]
KINDS: list[dict[str, Any]] = [
    {},
    {"affine": False},
    {"momentum": None},
    {"track_running_stats": False},
    {"bias": False},
]


def one_batch(rest: tuple[int, ...], sizes: tuple[int, int], step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every rank's samples, and what the loss weighs their outputs with; far from zero, where sums lose digits."""
    generator = torch.Generator().manual_seed(step)
    shape = (sum(sizes), 3, *rest)
    x = 1000 + torch.randn(shape, generator=generator, dtype=torch.float64)
    return x, torch.randn(shape, generator=generator, dtype=torch.float64)


def equals_one_process(rest: tuple[int, ...], layer: type[nn.Module], sizes: tuple[int, int], kind: Any) -> None:
    torch.manual_seed(0)
    alone = layer(3, dtype=torch.float64, **kind)
    for parameter in alone.parameters():
        nn.init.normal_(parameter)
    ours = convert(copy.deepcopy(alone))
    assert type(ours) is SyncBatchNorm
    rank = dist.get_rank()
    part = slice(0, sizes[0]) if rank == 0 else slice(sizes[0], None)
    for step in range(3):
        batch, weights = one_batch(rest, sizes, step)
        x, own = batch.clone().requires_grad_(), batch[part].clone().requires_grad_()
        for model in (alone, ours):
            model.zero_grad()
        y, mine = alone(x), ours(own)
        (y * weights).sum().backward()
        (mine * weights[part]).sum().backward()
        torch.testing.assert_close(mine, y[part])
        torch.testing.assert_close(own.grad, x.grad[part], rtol=1e-6, atol=1e-8)  # type: ignore[index]
        for parameter, expected in zip(ours.parameters(), alone.parameters(), strict=True):
            dist.all_reduce(parameter.grad)
            torch.testing.assert_close(parameter.grad, expected.grad)
        for name, buffer in ours.named_buffers():
            torch.testing.assert_close(buffer, alone.get_buffer(name))
    x = one_batch(rest, (2, 2), 9)[0]
    torch.testing.assert_close(ours.eval()(x), alone.eval()(x))


def every_shape_and_kind() -> None:
    for rest, layer, sizes in SHAPES:
        for kind in KINDS:
            equals_one_process(rest, layer, sizes, kind)


def test_two_ranks_are_one_process_with_both_batches(run: Run) -> None:
    run(every_shape_and_kind)


def formats() -> None:
    layer = convert(nn.BatchNorm2d(3))
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert layer(x).is_contiguous(memory_format=torch.channels_last)
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    with torch.no_grad():
        assert not layer(x).requires_grad
    statistics = [torch.empty_like(layer.running_var) for _ in range(2)]
    dist.all_gather(statistics, layer.running_var)
    assert torch.equal(*statistics)
    with pytest.raises(ValueError, match=r"takes \(samples, 3, \.\.\.\), got an input of shape \[2, 4, 5\]"):
        layer(torch.randn(2, 4, 5))
    layer = convert(nn.BatchNorm1d(3))
    sizes = (1, 0)
    with pytest.raises(ValueError, match=r"more than one value per channel over all ranks, got 1 \(this rank's input"):
        layer(torch.randn(sizes[dist.get_rank()], 3))


def test_formats_stay_and_too_little_is_refused_on_every_rank(run: Run) -> None:
    run(formats)


def train(model: nn.Module, ddp: bool) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    called = DistributedDataParallel(model) if ddp else model
    sync = None if ddp else gs.attach(model, optimizer)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        called(torch.randn(6, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if sync is not None:
        sync.detach()
    return dict(model.state_dict())


def attached() -> None:
    """Its collectives are on the default group, those of gradients on groups of our own: neither disturbs the other."""
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(4)]
    model = convert(nn.Sequential(*blocks))
    stock = train(copy.deepcopy(model), ddp=True)
    ours = train(model, ddp=False)
    assert list(ours) == list(stock)
    for name, tensor in ours.items():
        assert torch.equal(tensor, stock[name]), name


def test_attached_models_train_the_bits_of_ddp(run: Run) -> None:
    run(attached)


def test_layers_are_converted_and_reverted_where_they_are() -> None:
    net = nn.Sequential(nn.BatchNorm2d(3), nn.SyncBatchNorm(3), nn.Sequential(nn.BatchNorm1d(3, affine=False)))
    parts, state = list(net.modules()), list(net.state_dict(keep_vars=True).values())
    kinds = [type(each) for each in parts]
    assert convert(convert(net)) is net
    assert [type(each) for each in net.modules() if isinstance(each, SyncBatchNorm)] == [SyncBatchNorm] * 3
    assert revert(net) is net
    assert [type(each) for each in net.modules()] == kinds
    assert all(a is b for a, b in zip(net.modules(), parts, strict=True))
    assert all(a is b for a, b in zip(net.state_dict(keep_vars=True).values(), state, strict=True))
    with pytest.raises(ValueError, match="0 is a Activated with a forward of its own, which would be lost"):
        convert(nn.Sequential(Activated(3)))
    with pytest.raises(ValueError, match="0 does not know its channels yet; run a batch through it first"):
        convert(nn.Sequential(nn.LazyBatchNorm1d()))


class Activated(nn.BatchNorm1d):
    """With something after it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


def untracked() -> None:
    """As PyTorch's: what is switched off later is not counted either."""
    layer = convert(nn.BatchNorm1d(3))
    layer.track_running_stats = False
    layer(torch.randn(4, 3))
    assert layer.running_mean.tolist() == [0.0] * 3
    assert layer.num_batches_tracked.item() == 0


def test_statistics_that_are_not_tracked_stay(run: Run) -> None:
    run(untracked)


def test_one_rank_is_batch_norm(run: Run) -> None:
    run(one_rank, ranks=1)


def one_rank() -> None:
    torch.manual_seed(2)
    plain, x = nn.BatchNorm1d(4), torch.randn(5, 4)
    ours = convert(copy.deepcopy(plain))
    assert torch.equal(ours(x), plain(x))
    assert torch.equal(ours.running_var, plain.running_var)
