"""Part 2 with many ranks in one process: only the mathematics, on a CPU or a GPU. No group, no bytes on any wire.

    rank 0's batch ─▶ gradients ─┐
    rank 1's batch ─▶ gradients ─┼─▶ `Averaging.mean`, through the compressor ─▶ one optimizer step
    …                            ┘

One model serves for all, since replicas are the same after every step; and one pass, which finds the gradients of
all ranks' batches side by side.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradsync.cli.demo.story.demo_model import loss_of
from slow_link import data
from slow_link.averaging import Averaging
from slow_link.loss import Task, cell
from slow_link.model import SIZES, build, evaluate, optimizer_of
from slow_link.variants import EXACT, VARIANTS


def supports(arm: str) -> bool:
    """Whether an arm can be played here: exact averaging, and whatever goes through a compressor."""
    return arm == EXACT or VARIANTS[arm].compress is not None


def learn(task: Task, arm: str, seed: int, device: str) -> dict[str, Any]:
    """One cell, as `loss.learn` gives it."""
    torch.set_num_threads(1)  # several runs side by side, of other seeds, do more than several threads
    shape = SIZES[task.size]
    model = build(shape, seed).to(device)
    optimizer = optimizer_of(model, task.optimizer)
    named = dict(model.named_parameters())
    values = {name: parameter.detach() for name, parameter in named.items()}
    averaging = Averaging(named, VARIANTS[arm].compress, task.ranks)
    of_all_ranks = vmap(grad_and_value(partial(_loss, model)), in_dims=(None, 0))
    unseen = tuple(part.to(device) for part in data.held_out(shape))
    looks = set(task.looks())
    train: list[torch.Tensor] = []
    held_out: list[float] = []
    for step in range(task.steps):
        for group in optimizer.param_groups:
            group["lr"] = task.lr_at(step)
        batches = _stack([data.batch(shape, seed, step, rank) for rank in range(task.ranks)], device)
        with sdpa_kernel(SDPBackend.MATH):  # the others know no batch of ranks
            gradients, losses = of_all_ranks(values, batches)
        train.append(losses.mean())  # no .item(): a GPU runs ahead
        for name, mean in averaging.mean(gradients).items():
            named[name].grad = mean
        optimizer.step()
        if step + 1 in looks:
            held_out.append(evaluate(model, unseen))
    return cell(task, torch.stack(train).tolist(), held_out)


def _loss(model: nn.Module, parameters: dict[str, torch.Tensor], batch: data.Batch) -> torch.Tensor:
    return loss_of(partial(functional_call, model, parameters), batch)


def _stack(batches: list[data.Batch], device: str) -> data.Batch:
    text, following = (torch.stack(part).to(device) for part in zip(*batches, strict=True))
    return text, following
