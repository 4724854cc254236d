"""SyncBatchNorm on CPUs: the statistics of all ranks' batches, which PyTorch itself has for GPUs only.

    model = convert(model)              # before attach; parameters and buffers stay the objects that they are

Note [Two exchanges]
    forward    counts, means and squared deviations are gathered, and every rank merges them in the order of the
               ranks: running statistics stay equal to the bit, and a rank may have a batch of another size, or none
    backward   a rank's input has moved the outputs of all: Σ dy and Σ dy·x̂ are summed over the ranks. The gradients of
               weight and bias stay this rank's own, to be averaged like those of every other parameter

    Both are collectives of the forward's and backward's own order, on the group given, never on ours.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

__all__ = ["SyncBatchNorm", "convert", "revert"]


class SyncBatchNorm(_BatchNorm):
    """Batch normalization over the batches of all ranks of a group. `convert` makes it of a BatchNorm.

    It works on any device; on a GPU PyTorch's own, which is fused, is faster. It is none of PyTorch's, whose DDP
    refuses those on a CPU.
    """

    process_group: dist.ProcessGroup | None
    converted_from: type[_BatchNorm]
    former_group: Any  # of a `torch.nn.SyncBatchNorm` that this was

    def forward(self, input: Tensor) -> Tensor:
        group = self.process_group or (dist.group.WORLD if dist.is_initialized() else None)
        if not self.training or group is None or dist.get_world_size(group) == 1:
            return super().forward(input)
        self._check_input_dim(input)
        momentum = self.momentum
        running: list[Tensor | None] = [None, None]
        if self.track_running_stats:
            running = [self.running_mean, self.running_var]
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
                if momentum is None:  # a mean over all batches, each counting the same
                    momentum = 1.0 / self.num_batches_tracked.item()
        output: Tensor = _Normalize.apply(input, self.weight, self.bias, *running, self.eps, momentum, group)
        return output

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"batch normalization of {self.num_features} channels takes (samples, {self.num_features}, ...), "
                f"got an input of shape {list(input.shape)}"
            )


_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward)


def convert(module: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Make every BatchNorm in `module` a `SyncBatchNorm`, where it is: parameters, buffers and names stay.

    `group`: whose batches count; None: those of all ranks. `revert` takes it back.

    >>> net = convert(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    >>> type(net[1]).__name__, list(net.state_dict())[2:4]
    ('SyncBatchNorm', ['1.weight', '1.bias'])
    >>> type(revert(net)[1]).__name__
    'BatchNorm1d'
    """
    for name, each in module.named_modules():
        if not isinstance(each, _BatchNorm):
            continue
        if any(is_lazy(tensor) for tensor in (*each.parameters(), *each.buffers())):
            raise ValueError(f"{name or 'this BatchNorm'} does not know its channels yet; run a batch through it first")
        if type(each).forward not in _FORWARDS:
            raise ValueError(
                f"{name or 'this module'} is a {type(each).__name__} with a forward of its own, which would be lost; "
                "take a plain BatchNorm, and do what comes after it in a module of its own"
            )
        if not isinstance(each, SyncBatchNorm):
            each.converted_from = type(each)  # type: ignore[assignment]  # no tensor, and need not be one
            former = each.process_group if isinstance(each, nn.SyncBatchNorm) else None
            each.former_group = former  # type: ignore[assignment]
            each.__class__ = SyncBatchNorm  # the same attributes, another forward
        each.process_group = group  # type: ignore[assignment]
    return module


def revert(module: nn.Module) -> nn.Module:
    """Make every `SyncBatchNorm` the BatchNorm that it was."""
    for each in module.modules():
        if isinstance(each, SyncBatchNorm):
            each.process_group = each.former_group
            each.__class__ = each.converted_from  # type: ignore[assignment]
    return module


class _Normalize(torch.autograd.Function):
    """Normalizes as [Two exchanges] says. Sums are taken in fp32, or in fp64 for fp64."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        eps: float,
        momentum: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        x = _rows(input)
        count, mean, deviation = _merged(x, group)
        if count < 2:
            raise ValueError(
                f"batch statistics need more than one value per channel over all ranks, got {count:g} "
                f"(this rank's input has shape {list(input.shape)})"
            )
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((deviation / (count - 1)).to(running_var.dtype), momentum)
        invstd = torch.rsqrt(deviation / count + eps)
        ctx.save_for_backward(input, weight, mean, invstd)
        ctx.count, ctx.group = count, group
        y = (x - mean) * invstd
        if weight is not None:
            y = y * weight
        if bias is not None:
            y = y + bias
        return _like(y, input)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, invstd = ctx.saved_tensors
        dy, normal = _rows(grad), (_rows(input) - mean) * invstd
        sums = torch.stack([dy.sum(0), (dy * normal).sum(0)])
        grad_bias, grad_weight = sums.unbind()
        grad_input = None
        if ctx.needs_input_grad[0]:
            everyone = sums.clone()
            dist.all_reduce(everyone, group=ctx.group)
            mean_dy, mean_dy_normal = (everyone / ctx.count).unbind()
            scale = invstd if weight is None else invstd * weight
            grad_input = _like((dy - mean_dy - normal * mean_dy_normal) * scale, input)
        return (
            grad_input,
            grad_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            grad_bias.to(grad.dtype if weight is None else weight.dtype) if ctx.needs_input_grad[2] else None,
            *[None] * 5,
        )


def _merged(x: Tensor, group: dist.ProcessGroup) -> tuple[float, Tensor, Tensor]:
    """Count, mean and sum of squared deviations by channel over the rows of all ranks, the same bits on each."""
    mean = x.mean(0) if len(x) else x.new_zeros(x.shape[1])
    own = torch.cat([mean, (x - mean).square().sum(0), x.new_tensor([len(x)])])
    ranks = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(ranks, own, group=group)
    table = torch.stack(ranks)
    channels = x.shape[1]
    means, deviations, counts = table[:, :channels], table[:, channels:-1], table[:, -1:]
    total = counts.sum().item()
    mean = (means * counts).sum(0) / max(total, 1)
    return total, mean, (deviations + counts * (means - mean).square()).sum(0)


def _rows(tensor: Tensor) -> Tensor:
    """The values by channel: one row for each place of each sample."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return wide.movedim(1, -1).reshape(-1, tensor.shape[1])


def _like(rows: Tensor, tensor: Tensor) -> Tensor:
    """Rows as a tensor of that shape, dtype and memory format."""
    moved = rows.reshape(*tensor.shape[:1], *tensor.shape[2:], tensor.shape[1]).movedim(-1, 1)
    return torch.empty_like(tensor).copy_(moved)
