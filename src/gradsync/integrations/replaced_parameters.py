"""Parameters that are others than those DDP wrapped: it goes on with the old ones, and nobody averages the new."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

import torch

from gradsync.engine.bucket import GradEntry
from gradsync.engine.jit_modules import parameters_of

_SHOWN = 3


def follow_parameters(entries: Iterable[GradEntry], model: torch.nn.Module) -> list[GradEntry]:
    """Have the entries hold what the model holds now; returns those whose parameter was replaced.

    One that only moved (as parametrizations move it) is followed. Where nothing alike stands in its place, the entry
    keeps the old one.
    """
    homes: dict[int, tuple[MutableMapping[str, Any], str]] = {
        id(param): (table, key) for table in map(parameters_of, model.modules()) for key, param in table.items()
    }
    replaced = []
    for entry in entries:
        found = entry.owner.get(entry.key)
        if found is entry.param:
            continue
        if id(entry.param) in homes:
            entry.follow(*homes[id(entry.param)])
            continue
        replaced.append(entry)
        if isinstance(found, torch.nn.Parameter) and _form(found) == _form(entry.param):
            entry.replace_param(found)
        else:
            entry.follow({entry.key: entry.param}, entry.key)
    return replaced


def describe_replaced(replaced: list[GradEntry]) -> str:
    """Say what replaced parameters mean."""
    names = [entry.name for entry in replaced]
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    what = "parameter" if len(names) == 1 else f"{len(names)} parameters"
    return (
        f"{what} ({shown}) replaced after DistributedDataParallel wrapped the model: it averages the old, and each "
        "rank trains the new alone; wrap the model again, or copy values into the old ones (load_state_dict without "
        "assign=True, param.data.copy_)"
    )


def _form(param: torch.nn.Parameter) -> tuple[object, ...]:
    return tuple(param.shape), param.dtype, param.device
