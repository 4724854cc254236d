"""The torch.distributed backend that the ranks use: what was asked for, or what their devices allow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from gradsync.transport.nccl_library import load_nccl


def check_backend(backend: str) -> None:
    """Refuse a name that this build of torch does not have, before any rank waits for another.

    >>> check_backend("gloo"); check_backend("cpu:gloo")
    """
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a name such as 'gloo', got {backend!r}")
    choices = available_backends()
    pairs = [part.rpartition(":") for part in backend.split(",")]
    if len(pairs) > 1 and not all(device for device, _, _ in pairs):
        raise ValueError(f"backend {backend!r} must name a device for each, such as 'cpu:gloo,cuda:nccl'")
    for _, _, name in pairs:
        if name == "gradsync" and name not in choices:
            raise ValueError(f"backend {backend!r} is not registered in this process: import gradsync.backend first")
        if name not in choices:
            raise ValueError(
                f"backend must be one of {', '.join(choices)}, or device:backend pairs of them such as "
                f"'cpu:gloo,cuda:nccl', got {backend!r}"
            )


def available_backends() -> list[str]:
    """The backends of this build of torch, and those that plugins registered."""
    names = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
    return [name for name in names if dist.is_backend_available(name)]


def backends_by_device(backend: str) -> dict[str, str]:
    """Return which backend serves which device.

    >>> backends_by_device("cpu:gloo,cuda:nccl")
    {'cpu': 'gloo', 'cuda': 'nccl'}
    """
    if ":" in backend:
        return dict(part.split(":") for part in backend.split(","))
    return dict.fromkeys(dist.Backend.backend_capability.get(backend, ["cpu", "cuda"]), backend)


def use_device(local_rank: int) -> str | None:
    """Make this rank's GPU the current one; returns the GPU's UUID, None without GPUs.

    A launcher may show every rank all GPUs of the host, or each its own as number 0: the remainder is
    right in both cases.
    """
    if not torch.cuda.is_available():
        return None
    device = local_rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    return str(torch.cuda.get_device_properties(device).uuid)


def default_backend(gpus: Sequence[str | None], share_gpus: bool = False) -> tuple[str, str | None]:
    """The backend for ranks on these GPUs (UUIDs, by rank), and a sentence where it is not the fast one.

    With `share_gpus` several ranks may use NCCL on one GPU.

    >>> default_backend([None, None])
    ('gloo', None)
    """
    if all(gpu is None for gpu in gpus):
        return "gloo", None
    without = [rank for rank, gpu in enumerate(gpus) if gpu is None]
    if without:
        return "gloo", f"rank {without[0]} has no GPU and others have, so gloo serves all"
    if (sharing := shared_gpu(gpus)) is not None and not share_gpus:
        first, second = sharing
        why = f"ranks {first} and {second} share a GPU, which NCCL cannot by itself"
        return "cpu:gloo,cuda:gloo", (
            f"{why}, so gloo serves CUDA tensors through the host; gs.init(share_gpus=True) or "
            "GRADSYNC_SHARE_GPUS=1 lets NCCL do it, for tests"
        )
    if (lack := nccl_lack()) is not None:
        return "cpu:gloo,cuda:gloo", f"{lack}, so gloo serves CUDA tensors through the host"
    return "cpu:gloo,cuda:nccl", None


def nccl_lack() -> str | None:
    """Return why NCCL cannot serve this rank; None if it can."""
    if not dist.is_nccl_available():
        return "this build of torch has no NCCL"
    try:
        load_nccl()
    except ImportError as error:
        return str(error)
    return None


def shared_gpu(gpus: Sequence[str | None]) -> tuple[int, int] | None:
    """Two ranks on one GPU, if there are. By UUID, since each rank may see its own GPU as number 0.

    >>> shared_gpu(["a", "b", "a"]), shared_gpu([None, None])
    ((0, 2), None)
    """
    seen: dict[str, int] = {}
    for rank, gpu in enumerate(gpus):
        if gpu is not None and gpu in seen:
            return seen[gpu], rank
        if gpu is not None:
            seen[gpu] = rank
    return None
