"""On GPUs over NCCL, which the ranks may share: what the engine promises, each promise in a small training of its own.

Larger tests of the host run over NCCL too, see the list in `tests/gpu`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compress_cases import EVERY
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync as gs
from gradsync.launch.spawn import RankPool
from silent_device import host_never_waits
from yardstick import assert_replicas_equal

Run = Callable[..., list[Any]]
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="There is no GPU on this machine."),
    pytest.mark.timeout(150),
]
ALGORITHMS = {
    "native": gs.native(),
    "ring": gs.ring(),
    "tree": gs.tree(),
    "halving_doubling": gs.halving_doubling(),
    "hierarchical": gs.hierarchical(),
}


def model_on_gpu() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5)).cuda()


def batch(step: int) -> torch.Tensor:
    return torch.randn(16, 40, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank())).cuda()


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach() for name, param in model.named_parameters()}


def assert_same_on_all(model: nn.Module) -> None:
    assert_replicas_equal({name: tensor.cpu() for name, tensor in parameters_of(model).items()})


def fit(plan: gs.Plan | None, steps: int = 6, silent_from: int | None = None) -> nn.Module:
    """The model, trained with gradsync, or with DDP where there is no plan."""
    model = model_on_gpu()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sync = None if plan is None else gs.attach(model, optimizer, plan)
    forward = DistributedDataParallel(model) if plan is None else model
    for step in range(steps):
        inputs = batch(step)
        if silent_from is not None and step >= silent_from:
            with host_never_waits():
                forward(inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        else:
            forward(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    if sync is not None:
        sync.detach()
    return model


def compare_with_ddp() -> None:
    ours, theirs = (parameters_of(fit(plan)) for plan in (gs.Plan(bucket_bytes=1 << 13), None))
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-5)


def every_compressor(names: list[str]) -> None:
    for name in names:
        model = fit(gs.Plan(compress=EVERY[name], bucket_bytes=1 << 13))
        assert_same_on_all(model)
        assert all(param.isfinite().all() for param in model.parameters()), name


def test_eight_ranks_train_as_ddp_does_and_with_compression() -> None:
    with RankPool(8, threads=1, nccl=True) as ranks:
        ranks.run(compare_with_ddp, timeout=100)
        ranks.run(every_compressor, ["int8", "powersgd"], timeout=100)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_compressor_keeps_replicas_equal(nccl: Run, ranks: int) -> None:
    nccl(every_compressor, list(EVERY), ranks=ranks, timeout=120)


def no_waiting(names: list[str]) -> None:
    for name in names:
        fit(gs.Plan(compress=EVERY[name] if name else None, bucket_bytes=1 << 13), steps=10, silent_from=6)


def test_no_rank_waits_for_its_gpu_in_a_step(nccl: Run) -> None:
    nccl(no_waiting, ["", "bf16", "int8", "powersgd"], ranks=2, timeout=120)


def every_algorithm() -> None:
    exact = fit(gs.Plan())
    for name, algorithm in ALGORITHMS.items():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*on NCCL sends point to point")
            model = fit(gs.Plan(algorithm=algorithm))
        assert_same_on_all(model)
        for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_algorithm_gives_the_mean(nccl: Run, ranks: int) -> None:
    nccl(every_algorithm, ranks=ranks, timeout=120)


def uneven_batches() -> None:
    model = model_on_gpu()
    sync = gs.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sync.join():
        for step in range(3 + dist.get_rank()):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    sync.detach()
    assert_same_on_all(model)


def test_ranks_may_have_unequally_many_batches(nccl: Run) -> None:
    nccl(uneven_batches, ranks=3, timeout=120)


def weighted_mean() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = nn.Linear(8, 1, bias=False).cuda()
    sync = gs.attach(model)
    for _ in range(3):
        model.zero_grad()
        sync.set_batch_weight(rank + 1.0)
        model(torch.full((1, 8), float(rank), device="cuda")).sum().backward()
        expected = sum(r * (r + 1.0) for r in range(size)) / sum(r + 1.0 for r in range(size))
        assert model.weight.grad is not None
        torch.testing.assert_close(model.weight.grad, torch.full_like(model.weight.grad, expected))
    sync.detach()


def test_batches_may_weigh_differently(nccl: Run) -> None:
    nccl(weighted_mean, ranks=3, timeout=120)


def several_models() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    models = [nn.Linear(8, 8, bias=False).cuda() for _ in range(2)]
    syncs = [gs.attach(model) for model in models]
    inputs = torch.full((1, 8), float(rank), device="cuda")
    for step in range(3):
        for model in models:
            model.zero_grad()
        order = models if (rank + step) % 2 else models[::-1]  # not the same on all ranks
        outputs = [model(inputs).sum() for model in order]
        (outputs[0] + outputs[1]).backward()
        for model in models:
            assert model.weight.grad is not None
            assert torch.equal(model.weight.grad, torch.full_like(model.weight.grad, (size - 1) / 2))
    for sync in syncs:
        sync.detach()


def test_several_models_share_a_backward(nccl: Run) -> None:
    nccl(several_models, ranks=2, timeout=120)
    nccl(several_models, ranks=4, timeout=120)


def save(compress: Any) -> dict[str, torch.Tensor]:
    """A rank's state after three steps, and the weights, in host memory."""
    model = model_on_gpu()
    sync = gs.attach(model, plan=gs.Plan(compress=compress, bucket_bytes=1 << 13))
    for step in range(3):
        model(batch(step)).square().mean().backward()
        model.zero_grad()
    state = sync.state_dict(all_ranks=True)
    sync.detach()
    return {name: tensor.cpu() for name, tensor in state.items()}


def resume(state: dict[str, torch.Tensor], compress: Any) -> None:
    model = model_on_gpu()
    sync = gs.attach(model, plan=gs.Plan(compress=compress, bucket_bytes=1 << 13))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sync.load_state_dict(state if dist.get_rank() == 0 else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sync.detach()
    assert_same_on_all(model)


@pytest.mark.parametrize("name", ["int8", "powersgd"])
def test_a_checkpoint_is_resumed_with_another_number_of_ranks(nccl: Run, name: str) -> None:
    state = nccl(save, EVERY[name], ranks=2, timeout=120)[0]
    assert state
    nccl(resume, state, EVERY[name], ranks=3, timeout=120)


def others_collectives() -> None:
    """The user's own collectives on the default group, on the same GPU, while our backward is under way."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = model_on_gpu()
    sync = gs.attach(model, plan=gs.Plan(bucket_bytes=1 << 13))
    sums: list[torch.Tensor] = []

    def hook(grad: torch.Tensor) -> None:
        mine = torch.full((1 << 16,), float(rank), device="cuda")
        dist.all_reduce(mine)
        sums.append(mine[0])

    for layer in (0, 2, 4):
        model[layer].weight.register_hook(hook)  # type: ignore[index, union-attr, operator]
    for step in range(5):
        model.zero_grad()
        model(batch(step)).square().mean().backward()
    assert len(sums) == 15
    assert {float(each) for each in sums} == {size * (size - 1) / 2}
    assert_replicas_equal({n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None})
    sync.detach()


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_users_collectives_run_during_backward(nccl: Run, ranks: int) -> None:
    nccl(others_collectives, ranks=ranks, timeout=120)


def nonfinite_gradients() -> list[str]:
    model = model_on_gpu()
    sync = gs.attach(model, guard=gs.Guard(nonfinite="raise"))
    said = []
    for step in range(3):
        inputs = batch(step)
        if step == 1 and dist.get_rank() == 1:
            inputs[0, 0] = torch.nan
        try:
            model(inputs).square().mean().backward()
        except gs.NonFinite as error:
            said.append(str(error))
        model.zero_grad()
    sync.detach()
    return said


def test_a_nan_is_named_on_every_rank(nccl: Run) -> None:
    for said in nccl(nonfinite_gradients, ranks=3, timeout=120):
        assert len(said) == 1
        assert "rank 1 has NaN or Inf in the gradient of" in said[0]


def graphed() -> None:
    """The model's forward and backward are CUDA graphs; gradients leave when the replayed backward has brought them."""
    plain = fit(gs.Plan(bucket_bytes=1 << 13))
    model = model_on_gpu()
    torch.cuda.make_graphed_callables(model, (torch.randn(16, 40, device="cuda"),))
    model.load_state_dict(model_on_gpu().state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sync = gs.attach(model, optimizer, gs.Plan(bucket_bytes=1 << 13))
    for step in range(6):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sync.detach()
    assert_same_on_all(model)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_forward_and_backward_may_be_cuda_graphs(nccl: Run) -> None:
    nccl(graphed, ranks=2, timeout=120)


def compiled() -> None:
    plain = fit(gs.Plan(bucket_bytes=1 << 13))
    model = model_on_gpu()
    model.compile(backend="aot_eager")  # the hooks are those of any backend
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sync = gs.attach(model, optimizer, gs.Plan(bucket_bytes=1 << 13))
    for step in range(6):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sync.detach()
    assert_same_on_all(model)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_compiled_model_trains_as_the_plain_one(nccl: Run) -> None:
    nccl(compiled, ranks=2, timeout=140)


def with_hook(compress: Any) -> None:
    torch.manual_seed(1)
    model = model_on_gpu()
    ddp = DistributedDataParallel(model)
    state, hook = gs.ddp_hook(gs.Plan(compress=compress), ddp)
    ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        ddp(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state.close()
    assert_same_on_all(model)


@pytest.mark.parametrize("name", ["", "bf16", "int8", "powersgd"])
def test_a_hook_of_ddp_keeps_replicas_equal(nccl: Run, name: str) -> None:
    nccl(with_hook, EVERY[name] if name else None, ranks=3, timeout=120)


def observed() -> None:
    model = model_on_gpu()
    plain = copy.deepcopy(model)
    weights = []
    for each, looks_on in ((model, True), (plain, False)):
        ddp = DistributedDataParallel(each)
        observer = gs.observe(ddp) if looks_on else None
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for step in range(5):
            ddp(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if observer is not None:
            assert observer.stats()["steps"] == 5
            observer.close()
        weights.append(parameters_of(each))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_ddp_is_observed_and_trains_the_same(nccl: Run) -> None:
    nccl(observed, ranks=2, timeout=120)
