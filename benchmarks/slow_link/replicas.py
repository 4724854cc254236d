"""Part 2 with many ranks in one process: only the mathematics, on a CPU or a GPU. No group, no bytes on any wire.

    rank 0's batch ─▶ gradients ─┐
    rank 1's batch ─▶ gradients ─┼─▶ `averaging.average`, through the compressor ─▶ one optimizer step
    …                            ┘

One model serves for all, since replicas are the same after every step.
"""

from __future__ import annotations

from typing import Any

import torch

from gradsync.cli.story.model import loss_of
from slow_link import data
from slow_link.arms import ARMS, EXACT
from slow_link.averaging import Averaging
from slow_link.loss import Task, cell
from slow_link.model import SIZES, build, evaluate, optimizer_of


def plays(arm: str) -> bool:
    """Whether an arm can be played here: exact averaging, and whatever goes through a compressor."""
    return arm == EXACT or ARMS[arm].compress is not None


def learn(task: Task, arm: str, seed: int, device: str) -> dict[str, Any]:
    """One cell, as `loss.learn` gives it."""
    torch.set_num_threads(1)  # several runs side by side, of other seeds, do more than several threads
    shape = SIZES[task.size]
    model = build(shape, seed).to(device)
    optimizer = optimizer_of(model, task.optimizer)
    named = dict(model.named_parameters())
    averaging = Averaging(named, ARMS[arm].compress, task.ranks)
    unseen = _on(device, data.held_out(shape))
    looks = set(task.looks())
    train: list[torch.Tensor] = []
    held_out: list[float] = []
    for step in range(task.steps):
        for group in optimizer.param_groups:
            group["lr"] = task.lr_at(step)
        losses = []
        for rank in range(task.ranks):
            loss = loss_of(model, _on(device, data.batch(shape, seed, step, rank)))
            averaging.bring(rank, torch.autograd.grad(loss, list(named.values())))
            losses.append(loss.detach())
        train.append(torch.stack(losses).mean())  # no .item(): a GPU runs ahead
        for parameter, mean in zip(named.values(), averaging.mean(), strict=True):
            parameter.grad = mean
        optimizer.step()
        if step + 1 in looks:
            held_out.append(evaluate(model, unseen))
    return cell(task, torch.stack(train).tolist(), held_out)


def _on(device: str, batch: data.Batch) -> data.Batch:
    return batch[0].to(device), batch[1].to(device)
