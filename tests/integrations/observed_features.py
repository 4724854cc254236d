"""What DistributedDataParallel can be asked for, each as a short training; all ranks run it.

Parts of PyTorch that warn when they are imported are imported where they are used.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

STEPS = 4
Wrap = Callable[..., DistributedDataParallel]
Told = list[Any]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 3))


class Words(nn.Module):
    """Sparse and dense gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(23, 7, sparse=True)
        self.places = nn.Embedding(5, 7)
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x[:, :5].abs() * 7).long() % 23
        return self.head(self.words(tokens).tanh() + self.places(torch.arange(5))).sum(1)


class Branches(nn.Module):
    """Ranks use other branches, and one nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.branches = nn.Linear(9, 20), nn.ModuleList(nn.Linear(20, 3) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branches[dist.get_rank() % 2](torch.tanh(self.trunk(x)))


class Normed(nn.Module):
    """Buffers that every forward changes."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(9, 16), norm(16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


def data(num: int = STEPS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(4, 9, generator=generator) for _ in range(num)]


def sgd(ddp: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)


def held(ddp: nn.Module) -> Told:
    return [tensor.detach().clone() for tensor in ddp.module.state_dict().values()]  # type: ignore[union-attr]


def train(ddp: DistributedDataParallel, num: int = STEPS, **zero: Any) -> Told:
    optimizer = sgd(ddp)
    for x in data(num):
        ddp(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(**zero)
    return held(ddp)


def raised(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing"]


# What each feature does


def dropout(wrap: Wrap) -> Told:
    """Numbers of the global generator, also between two steps."""
    torch.manual_seed(dist.get_rank())
    ddp = wrap(nn.Sequential(nn.Linear(9, 16), nn.Dropout(0.5), nn.Linear(16, 3)))
    return [*train(ddp), torch.rand(3), torch.get_default_dtype(), torch.get_num_threads()]


def bucket_view(wrap: Wrap) -> Told:
    return train(wrap(mlp(), gradient_as_bucket_view=True)) + train(
        wrap(mlp(), gradient_as_bucket_view=True), set_to_none=False
    )


def batched_copy(wrap: Wrap) -> Told:
    known = "batched_grad_copy" in inspect.signature(DistributedDataParallel.__init__).parameters
    return train(wrap(mlp(), **({"batched_grad_copy": True} if known else {})))


def sparse(wrap: Wrap) -> Told:
    return train(wrap(Words())) + train(wrap(Words(), gradient_as_bucket_view=True))


def accumulation(wrap: Wrap) -> Told:
    found: Told = []
    for options in ({}, {"gradient_as_bucket_view": True}):
        ddp = wrap(mlp(), **options)
        optimizer = sgd(ddp)
        for i, x in enumerate(data(6)):
            with ddp.no_sync() if i % 3 != 2 else warnings.catch_warnings():
                ddp(x).square().mean().backward()
            if i % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        found += held(ddp)
    return found


def uneven(wrap: Wrap, again: bool = True, **options: Any) -> Told:
    ddp = wrap(Normed())
    optimizer = sgd(ddp)
    with ddp.join(**options):
        for x in data(2 + 2 * dist.get_rank()):
            ddp(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return held(ddp) + (train(ddp) if again else [])


def uneven_thrown(wrap: Wrap) -> Told:
    found: Told = []
    found += raised(lambda: found.extend(uneven(wrap, throw_on_early_termination=True)))
    dist.barrier()
    return found


def late_hook(wrap: Wrap) -> Told:
    ddp = wrap(mlp())
    train(ddp, 2)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    found = train(ddp)
    return found + raised(lambda: ddp.register_comm_hook(None, default_hooks.allreduce_hook))


def early_hook(wrap: Wrap) -> Told:
    # Not PyTorch's PowerSGD: its callbacks send from gloo's own threads, which at times ends the process.
    ddp = wrap(mlp())
    ddp.register_comm_hook(None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
    return train(ddp)


def builtin_hook(wrap: Wrap) -> Told:
    ddp = wrap(mlp())
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return train(ddp)


def bf16_hook(wrap: Wrap) -> Told:
    ddp = wrap(mlp())
    return raised(lambda: ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)) + train(ddp)


def logged(wrap: Wrap) -> Told:
    ddp = wrap(mlp())
    ddp._set_ddp_runtime_logging_sample_rate(1)
    train(ddp)
    said = ddp._get_ddp_logging_data()
    return [sorted(said), said.get("comm_hook"), said["iteration"], len(ddp._comm_hooks)]


def mixed_precision(wrap: Wrap) -> Told:
    half = _MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)
    return raised(lambda: train(wrap(mlp(), mixed_precision=half)))  # on a CPU it is not served


def optimizer_in_backward(wrap: Wrap) -> Told:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    ddp = wrap(model)
    found = raised(lambda: ddp(data()[0]).square().mean().backward())  # on a CPU its streams are missing
    dist.barrier()
    return found + held(ddp)


def fused_optimizer(wrap: Wrap) -> Told:
    ddp = wrap(mlp())
    ddp._register_fused_optim(torch.optim.SGD, lr=0.1)
    for x in data():
        ddp(x).square().mean().backward()
    return held(ddp)


def zero_in_parts(wrap: Wrap) -> Told:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = wrap(mlp())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-2)
    for x in data():
        ddp(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return held(ddp)


def zero_overlapped(wrap: Wrap) -> Told:
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = wrap(mlp(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    allreduce = default_hooks.allreduce_hook
    return raised(lambda: hook_with_zero_step(allreduce, ddp, optimizer)) + train(ddp)  # gloo is refused


def delayed_parameters(wrap: Wrap) -> Told:
    """Nobody waits for their sum on a CPU: they are not stepped, or DDP itself would not train alike twice."""
    model = mlp()
    late = [(name, param) for name, param in model.named_parameters() if name.startswith("0.")]
    ddp = wrap(model, delay_all_reduce_named_params=late, param_to_hook_all_reduce=model[2].weight)
    optimizer = torch.optim.SGD(model[2:].parameters(), 0.1)
    for x in data():
        ddp(x).square().mean().backward()
        dist.barrier()
        optimizer.step()
        optimizer.zero_grad()
    return held(ddp)


def all_delayed(wrap: Wrap) -> Told:
    model = mlp()
    model[4].bias.requires_grad_(False)
    late = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    ddp = wrap(model, delay_all_reduce_named_params=late, param_to_hook_all_reduce=model[0].weight)
    return raised(lambda: ddp(data()[0]))


def unused(wrap: Wrap) -> Told:
    ddp = wrap(Branches())
    return (
        raised(lambda: train(ddp))
        if dist.get_world_size() == 1
        else train(wrap(Branches(), find_unused_parameters=True))
    )


def unused_unsaid(wrap: Wrap) -> Told:
    """Nobody uses a layer, and DDP was not told."""

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = mlp(), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    ddp = wrap(Idle())
    return raised(lambda: train(ddp))


def static_graph(wrap: Wrap) -> Told:
    return train(wrap(mlp(), static_graph=True)) + train(wrap(Checkpointed(), static_graph=True))


def buffers(wrap: Wrap) -> Told:
    return train(wrap(Normed())) + train(wrap(Normed(), broadcast_buffers=False))


def sync_batch_norm(wrap: Wrap) -> Told:
    return raised(lambda: train(wrap(nn.SyncBatchNorm.convert_sync_batchnorm(Normed()))))


def compiled(wrap: Wrap) -> Told:
    torch._dynamo.reset()
    ddp = wrap(mlp(), bucket_cap_mb=25)
    whole = torch.compile(ddp, backend="aot_eager")
    optimizer = sgd(ddp)
    for x in data():
        whole(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    inside = wrap(torch.compile(mlp(), backend="aot_eager"), bucket_cap_mb=25)
    return held(ddp) + train(inside)


def second_order(wrap: Wrap) -> Told:
    """A penalty on the gradient of the inputs."""
    ddp = wrap(mlp())
    optimizer = sgd(ddp)
    for x in data():
        x.requires_grad_()
        loss = ddp(x).square().mean()
        [slope] = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return held(ddp)


def raised_backward(wrap: Wrap) -> Told:
    """On all ranks, in the middle; what DDP says to the next forward."""
    ddp = wrap(mlp())
    found = train(ddp, 2)

    def fail(_: torch.Tensor) -> None:
        raise ValueError("out of memory, say")

    out = ddp(data()[0])
    handle = ddp.module[2].weight.register_hook(fail)
    found += raised(lambda: out.sum().backward())
    handle.remove()
    found += raised(lambda: ddp(data()[0]).sum().backward())
    dist.barrier()
    return found


def closure(wrap: Wrap) -> Told:
    ddp = wrap(mlp())
    optimizer = torch.optim.LBFGS(ddp.parameters(), max_iter=3)
    for x in data(2):

        def again(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = ddp(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(again)
    return held(ddp)


def half(wrap: Wrap) -> Told:
    ddp = wrap(mlp().to(torch.bfloat16))
    optimizer = sgd(ddp)
    for x in data():
        ddp(x.to(torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return held(ddp)


def copied(wrap: Wrap) -> Told:
    ddp = wrap(mlp())
    train(ddp, 1)
    return train(copy.deepcopy(ddp)) + train(ddp)


def evaluated(wrap: Wrap) -> Told:
    ddp = wrap(mlp())
    train(ddp, 1)
    with torch.no_grad():
        seen = [ddp(x) for x in data()]
    return seen + train(ddp)


def two_models(wrap: Wrap) -> Told:
    """In one backward."""
    first, second = wrap(mlp()), wrap(nn.Linear(3, 2))
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    for x in data():
        second(first(x)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return held(first) + held(second)


def own_group(wrap: Wrap) -> Told:
    pair = dist.new_group([0, 1])
    found = train(wrap(mlp(), process_group=pair)) if dist.get_rank() < 2 else []
    dist.barrier()
    return found


FEATURES: dict[str, Callable[[Wrap], Told]] = {
    "plain": lambda wrap: train(wrap(mlp())),
    "one large bucket": lambda wrap: train(wrap(mlp(), bucket_cap_mb=25)),
    "join by the initial size": lambda wrap: uneven(wrap, divide_by_initial_world_size=True),
    "join by who is active": lambda wrap: uneven(wrap, divide_by_initial_world_size=False),
    "join not enabled": lambda wrap: train(wrap(mlp())),
    "init_sync=False": lambda wrap: train(wrap(mlp(), init_sync=False)),
    **{
        function.__name__.replace("_", " "): function
        for function in (
            dropout, bucket_view, batched_copy, sparse, accumulation, uneven_thrown, late_hook, early_hook,
            builtin_hook, bf16_hook, logged, mixed_precision, optimizer_in_backward, fused_optimizer, zero_in_parts,
            zero_overlapped, delayed_parameters, all_delayed, unused, unused_unsaid, static_graph, buffers,
            sync_batch_norm, compiled, second_order, raised_backward, closure, half, copied, evaluated, two_models,
            own_group,
        )
    },
}  # fmt: skip
