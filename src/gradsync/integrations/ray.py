"""Ray Train: our stats and state in its reports, and the state of all workers after a restart.

Ray forms the process group, so `gs.attach` works in a worker as it does anywhere; `gs.init()` adopts the group. What
is ours to add is the checkpoint, for with error feedback each worker owes gradient that no other has:

    worker 0   state.pt, gradsync-rank0.safetensors ─┐   one folder in Ray's storage, registered when all have
    worker 1             gradsync-rank1.safetensors ─┴─▶ reported: a checkpoint is whole, or Ray never offers it
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gradsync import files
from gradsync.engine.handle import GradSync
from gradsync.integrations import rank_files

try:
    import ray.train
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"gradsync.integrations.ray needs Ray Train ({error}): install it with `pip install 'gradsync[ray]'`"
    ) from error

_SHARED = "state.pt"


def report(metrics: Mapping[str, Any], sync: GradSync, state: Mapping[str, Any] | None = None) -> None:
    """`ray.train.report` with what synchronization costs and, if `state` is given, a checkpoint of it and of `sync`.

    Every worker calls it, as Ray wants of its own. `state` is what is equal on all of them: the model's and the
    optimizer's state, the step. Worker 0's is written; it must be what `torch.load(weights_only=True)` reads.

        report({"loss": loss.item()}, sync, {"step": step, "model": model.state_dict(), "optimizer": ...})

    Ray registers the checkpoint when it next looks at its workers, after `RAY_TRAIN_HEALTH_CHECK_INTERVAL_S` seconds
    at most; if a worker dies before, the run resumes from the one before.
    """
    told = {**metrics, **stats(sync)}
    if state is None:
        ray.train.report(told)
        return
    with tempfile.TemporaryDirectory(prefix="gradsync-") as folder:  # Ray has copied it when its report returns
        write(Path(folder), sync, state, ray.train.get_context().get_world_rank())
        ray.train.report(told, checkpoint=ray.train.Checkpoint.from_directory(folder))


def resume() -> dict[str, Any] | None:
    """Return what the last checkpoint holds, with the state of `sync` under "sync"; None at the start of a run.

        if (state := resume()) is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            sync.load_state_dict(state["sync"])  # on every worker

    The number of workers may be another one than before: see docs/checkpoint.md.
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    context = ray.train.get_context()
    with checkpoint.as_directory() as folder:
        return read(Path(folder), context.get_world_rank(), context.get_world_size())


def stats(sync: GradSync) -> dict[str, Any]:
    """`sync.stats()` under names of our own, for `ray.train.report`. Ray keeps those of worker 0."""
    return {f"gradsync/{key}": value for key, value in sync.stats().items()}


def write(folder: Path, sync: GradSync, state: Mapping[str, Any], rank: int) -> None:
    """This worker's files of a checkpoint."""
    if "sync" in state:
        raise ValueError('state has a "sync" of its own: leave it out, report() adds that of the GradSync it is given')
    rank_files.save(sync, folder, rank=rank)
    if rank == 0:
        torch.save(dict(state), folder / _SHARED)
        _refuse_unreadable(folder / _SHARED)


def read(folder: Path, rank: int, world_size: int) -> dict[str, Any]:
    """A worker's share of a checkpoint: its own file, or with fewer workers than before those of several."""
    if not (folder / _SHARED).is_file():
        raise ValueError(
            f"the checkpoint in {folder} has no {_SHARED}, so gradsync.integrations.ray.report did not write it: "
            "read it as it was written, from ray.train.get_checkpoint()"
        )
    files.check_regular(folder / _SHARED)
    state: dict[str, Any] = torch.load(folder / _SHARED, map_location="cpu", weights_only=True)
    return {**state, "sync": rank_files.read(folder, rank, world_size)}


def _refuse_unreadable(file: Path) -> None:
    """Raise now, and not after the restart that needs the file. It is mapped, so that tensors are not read."""
    try:
        torch.load(file, weights_only=True, mmap=True)
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise ValueError(
            f"state holds something that torch.load(weights_only=True) would not read after a restart ({reason}): put "
            "only tensors, numbers, text, lists and dicts into it"
        ) from error
