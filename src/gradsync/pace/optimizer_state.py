"""The mean of the optimizers' state over the ranks: momentum and the like, tensors of floating point; counts stay.

What not every rank has stays too: a rank whose GradScaler has skipped every step so far has no state yet, and one
whose batches never touched a parameter has none for it.
"""

from __future__ import annotations

import torch

from gradsync.guard.agreement import share
from gradsync.pace.contract import Site
from gradsync.pace.means import average


def average_optimizers(site: Site) -> None:
    """Every rank calls this at once."""
    tensors = _tensors(site)
    mine = [[*key, list(tensor.shape), str(tensor.dtype)] for key, tensor in tensors.items()]
    everyones = [{str(form) for form in document["state"]} for document in share(site.lane, {"state": mine})]
    common = set.intersection(*everyones)
    alike = [tensors[key] for key, form in zip(tensors, mine, strict=True) if str(form) in common]
    average(site.lane, site.exact, alike)


def _tensors(site: Site) -> dict[tuple[int, str, str], torch.Tensor]:
    """By optimizer, parameter and key, in one order on every rank; parameters that we leave alone have no name."""
    names = {id(param): name for name, param in site.parameters}
    found = {}
    for number, optimizer in enumerate(site.optimizers):
        for param in (param for group in optimizer.param_groups for param in group["params"] if id(param) in names):
            for key, value in sorted(optimizer.state.get(param, {}).items()):
                # By name, for a count of steps has the shape of a parameter that is one number.
                if key != "step" and isinstance(value, torch.Tensor) and _fits(value, param):
                    found[number, names[id(param)], key] = value
    return found


def _fits(value: torch.Tensor, param: torch.Tensor) -> bool:
    return value.is_floating_point() and value.shape == param.shape
