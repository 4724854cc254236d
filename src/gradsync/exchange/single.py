"""`all_reduce`: the same machinery for one tensor, now, in place."""

from __future__ import annotations

import hashlib
from typing import Literal, get_args

import torch
import torch.distributed as dist

from gradsync.allreduce.native import Native
from gradsync.errors import Disagreement, GradSyncError, place

Op = Literal["mean", "sum"]

_CARD_NBYTES = 64


def all_reduce(
    tensor: torch.Tensor,
    *,
    algorithm: Native | None = None,
    op: Op = "mean",
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Replace `tensor` by its mean or sum over the ranks, in place, and return it.

    Every rank must bring the same shape and dtype; if they do not, all raise the same error before a byte
    of data moves. It runs on the group given, in the calling thread, as `torch.distributed.all_reduce` does.

    Args:
        tensor: Of any dtype that the backend can add; a mean needs a floating or complex one.
        algorithm: Which way the bytes travel. None or `native()`: the process group's own all-reduce.
        op: "mean" or "sum".
        group: Who takes part; None: everybody.
    """
    _check_call(tensor, algorithm, op)
    parent = dist.group.WORLD if group is None else group
    if parent is None:
        raise ValueError("there is no process group yet; call gs.init() before gs.all_reduce()")
    if dist.get_rank(parent) < 0:
        raise ValueError("this rank is not a member of the group given to all_reduce; only members may call it")
    size = dist.get_world_size(parent)
    if size == 1:
        return tensor
    try:
        _compare_cards(tensor, op, parent, size)
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if op == "mean":
            # Divided first, as in a gradient's bucket: half types do not overflow.
            flat.mul_(1.0 / size)
        dist.all_reduce(flat, group=parent)
    except Disagreement:
        raise
    except RuntimeError as error:
        where = place(dist.get_rank(), dist.get_world_size())
        raise GradSyncError(
            f"{where} all_reduce of {_describe(tensor)} failed: {str(error).splitlines()[0]}; "
            "a peer is gone or late, or the backend cannot add this dtype"
        ) from error
    with torch.no_grad():
        tensor.copy_(flat)
    return tensor


def _check_call(tensor: torch.Tensor, algorithm: Native | None, op: str) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        raise TypeError(
            f"all_reduce takes a dense torch tensor, got {getattr(tensor, 'layout', type(tensor).__name__)}"
        )
    if algorithm is not None and not isinstance(algorithm, Native):
        raise TypeError(f"algorithm must be None or gs.native(), got {algorithm!r}")
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise TypeError("all_reduce writes in place, which an expanded tensor does not allow; clone() it first")
    if op not in get_args(Op):
        raise ValueError(f'op must be "mean" or "sum", got {op!r}')
    if tensor.dtype == torch.bool:
        raise ValueError("torch.bool cannot be added up; pass tensor.int() instead")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f'the mean of {tensor.dtype} is not an integer; use op="sum" or a floating tensor')


def _compare_cards(tensor: torch.Tensor, op: str, group: dist.ProcessGroup, size: int) -> None:
    """Gloo aborts the process on a mismatch: compare a card of fixed size first."""
    text = f"{_describe(tensor)} {op}".encode()
    if len(text) > _CARD_NBYTES:
        text = hashlib.sha256(text).hexdigest().encode()
    card = torch.frombuffer(bytearray(text.ljust(_CARD_NBYTES)), dtype=torch.uint8)
    if torch.device("cpu") not in group._device_types:
        card = card.to(tensor.device)
    cards = [torch.empty_like(card) for _ in range(size)]
    dist.all_gather(cards, card, group=group)
    texts = [bytes(each.cpu().numpy()).decode().strip() for each in cards]
    if len(set(texts)) > 1:
        ranks = dist.get_process_group_ranks(group)
        said = "; ".join(f"rank {rank}: {text}" for rank, text in zip(ranks, texts, strict=True))
        raise Disagreement(f"all_reduce was called with different tensors ({said}); every rank must bring the same")


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
