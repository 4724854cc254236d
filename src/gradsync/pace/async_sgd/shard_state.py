"""A shard as flat tensors, to be saved, and back.

    version                        how many updates were made
    clock                          of every worker: all stand level when a shard is saved
    master.<parameter>             the parameter
    optimizer.<i>.<parameter>.<k>  tensor k that the i-th optimizer keeps for it
    number.<i>.<parameter>.<k>     the same, for a plain number

The hyper-parameters are in the user's optimizer, and are saved with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gradsync.errors import GradSyncError
from gradsync.pace.async_sgd.shard import Shard

State = dict[str, torch.Tensor]


def save(shard: Shard, clock: int) -> State:
    """Copies of all that the shard needs to go on."""
    state = {"version": torch.tensor(shard.version, device="cpu"), "clock": torch.tensor(clock, device="cpu")}
    for name, master in zip(shard.names, shard.masters, strict=True):
        state[f"master.{name}"] = master.detach().clone()
        for i, optimizer_copy in enumerate(shard.optimizer_copies):
            for key, value in optimizer_copy.state_of(master).items():
                if isinstance(value, torch.Tensor):
                    state[f"optimizer.{i}.{name}.{key}"] = value.clone()
                elif isinstance(value, bool | int | float):
                    state[f"number.{i}.{name}.{key}"] = torch.tensor(
                        value, dtype=torch.float64 if isinstance(value, float) else None, device="cpu"
                    )
                elif value is not None:
                    raise GradSyncError(
                        f"async_sgd cannot save the optimizer's {key!r} of {name!r}: it is a {type(value).__name__}, "
                        "and only tensors and numbers are saved. Use an optimizer that keeps those"
                    )
    return state


def load(shard: Shard, state: Mapping[str, torch.Tensor]) -> int:
    """Put back what `save` gave; the clock it was saved at."""
    shapes = {f"master.{name}": master.shape for name, master in zip(shard.names, shard.masters, strict=True)}
    saved = {key: value.shape for key, value in state.items() if key.startswith("master.")}
    if saved != shapes:
        odd = sorted({key for key, _ in saved.items() ^ shapes.items()})[0].removeprefix("master.")
        raise GradSyncError(
            f"the saved shard is not the one this rank keeps: they differ in {odd!r}. Every rank must load what the "
            "same rank saved, with the same model and equally many ranks"
        )
    shard.put([state[f"master.{name}"] for name in shard.names], int(state["version"]))
    for name, master in zip(shard.names, shard.masters, strict=True):
        for i, optimizer_copy in enumerate(shard.optimizer_copies):
            optimizer_copy.set_state(master, _optimizer_state(state, f"{i}.{name}.", master.device))
    return int(state["clock"])


def _optimizer_state(state: Mapping[str, torch.Tensor], prefix: str, device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in state.items():
        kind, _, rest = key.partition(".")
        entry = rest.removeprefix(prefix)
        if rest == entry or "." in entry:  # of another parameter, perhaps of one whose name goes on from ours
            continue
        if kind == "number":
            found[entry] = value.item()
        elif kind == "optimizer":  # a count of steps stays where the optimizer had it
            found[entry] = value.to(device, copy=True) if value.dim() else value.clone()
    return found
