"""`all_reduce` and `shared_empty`: the same machinery for one tensor, now, in place."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Literal

import torch
import torch.distributed as dist

from gradsync.algorithms.builtin import SharedMemory
from gradsync.algorithms.price import Algorithm
from gradsync.compress.param import Param
from gradsync.compress.recipe import Compressor
from gradsync.errors import Disagreement, GradSyncError, NotEnoughMemory
from gradsync.exchange.choose_route import ExactSum, UnfitAlgorithm
from gradsync.exchange.group_cache import LABEL_NBYTES, GroupCache, group_cache
from gradsync.exchange.means import mean_scale
from gradsync.kernels.library import CODES
from gradsync.plan.sync_plan import check_algorithm, check_compress
from gradsync.transport.pending import ByCaller
from gradsync.transport.shared_memory import PLACE, WORKER, LabelsDiffer

Op = Literal["mean", "sum"]

_TEXT_NBYTES = 40  # of a label: the place comes after it
_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")


def all_reduce(
    tensor: torch.Tensor,
    *,
    algorithm: Algorithm | None = None,
    compress: Compressor | None = None,
    op: Op = "mean",
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Replace `tensor` by its mean or sum over the ranks, in place, and return it.

    Every rank must bring the same shape and dtype; if they do not, all raise the same error before a byte
    of data moves. The first call on a group makes connections of our own for it.

    Args:
        tensor: Of any dtype that can be added; a mean needs a floating or complex one. One from
            `shared_empty` is reduced where it lies, any other is staged.
        algorithm: Which way the bytes travel; see `Plan`. None: the fastest for this group and size.
        compress: What travels; see `Plan`. Nothing is kept from one call to the next: what is lost is lost.
        op: "mean" or "sum".
        group: Who takes part; None: everybody.
    """
    _check_form(tensor)
    if algorithm is not None:
        check_algorithm(algorithm)
    if compress is not None:
        check_compress(compress)
    label = _checked_label(tensor.dtype, tensor.shape, op, algorithm, compress, tensor.device.type)
    parent = _members_group(group, "all_reduce")
    if parent.size() == 1:
        return tensor
    cache = group_cache(parent)
    with _call(cache, "all_reduce"):
        if compress is None:
            _reduce(cache, parent, tensor, algorithm, op, label)
        else:
            _reduce_compressed(cache, parent, tensor, algorithm, compress, op, label)
    return tensor


def shared_empty(
    shape: int | Sequence[int], dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """A tensor in memory that the ranks of this host share: `all_reduce` adds it up where it lies.

    Every rank of the group calls this at once, with the same shape and dtype. It holds zeros. The memory has no
    name and goes when the tensor goes.
    """
    numbers = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise ValueError(f"shape must be a whole number of at least 0, or several, got {shape!r}")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch dtype, torch.float32 say, got {dtype!r}")
    parent = _members_group(group, "shared_empty")
    if parent.size() == 1:
        return torch.zeros(numbers, dtype=dtype, device="cpu")
    cache, nbytes = group_cache(parent), math.prod(numbers) * dtype.itemsize
    team = cache.lane.team
    with _call(cache, "shared_empty"):
        _compare(cache, _label(dtype, numbers, "shared_empty"))
        if team is not None:
            try:
                return team.allocate(nbytes)[:nbytes].view(dtype).view(numbers)
            except NotEnoughMemory as error:
                raise NotEnoughMemory(f"{error}; ask for less, or use a plain tensor") from None
    why = cache.lane.lacks or "every rank of this group has a host of its own"
    raise GradSyncError(f"there is no shared memory here: {why}; use a plain tensor")


@contextmanager
def _call(cache: GroupCache, what: str) -> Iterator[None]:
    """Let one call run after the other; what goes wrong in it is said, or ends the lane."""
    with cache.turn:
        cache.lane.session.next_call(what, "call")
        try:
            yield
        except LabelsDiffer as error:
            raise _disagreement(error.labels, cache, what) from None
        except (ValueError, NotEnoughMemory):
            raise  # every rank came to it, before any data moved
        except BaseException as error:
            cache.lane.give_up(error)  # Ctrl-C, say: nobody may go on from the middle of it
            raise


def _reduce(
    cache: GroupCache,
    parent: dist.ProcessGroup,
    tensor: torch.Tensor,
    algorithm: Algorithm | None,
    op: Op,
    label: bytes,
) -> None:
    """Sum it by a way that depends only on what the label says and all ranks share: they must go the same way."""
    lane = cache.lane
    scale = mean_scale(lane.groups.size, op)
    if lane.one_host and tensor.is_cpu and isinstance(algorithm, SharedMemory | None):
        flat = _flat(tensor)
        _reduce_in_memory(cache, torch.view_as_real(flat) if flat.is_complex() else flat, label, scale)
    else:
        alike = _compare(cache, label, tensor)
        exact = _exact(cache, parent, tensor.device, algorithm)
        flat = _flat(tensor)
        if not alike:
            flat = flat.clone()  # some have it in shared memory and some do not: now nobody has
        if scale != 1.0:
            flat.mul_(scale)  # first, as in a gradient's bucket: half types do not overflow
        lane.wait(exact.launch(flat.view(-1)))
    if flat.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(flat)


def _reduce_compressed(
    cache: GroupCache,
    parent: dist.ProcessGroup,
    tensor: torch.Tensor,
    algorithm: Algorithm | None,
    compress: Compressor,
    op: Op,
    label: bytes,
) -> None:
    _compare(cache, label, tensor)
    try:
        compressed = cache.compressed(parent, tensor.device, algorithm, compress)
    except UnfitAlgorithm as error:
        raise ValueError(str(error)) from None
    compressed.reduce(tensor, mean_scale(cache.lane.groups.size, op))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its elements lie one after the other as they are, else a copy of which that is true."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor.detach()
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _exact(cache: GroupCache, parent: dist.ProcessGroup, device: torch.device, algorithm: Algorithm | None) -> ExactSum:
    try:
        return cache.exact(parent, device, algorithm)
    except UnfitAlgorithm as error:
        raise ValueError(str(error)) from None


def _reduce_in_memory(cache: GroupCache, flat: torch.Tensor, label: bytes, scale: float) -> None:
    team = cache.lane.team
    assert team is not None
    try:
        cache.lane.wait(ByCaller(team, WORKER, team.sum_op(flat, label, scale), "all_reduce"))
    except LabelsDiffer as error:
        # Every rank sees the same labels. If only places differ, all stage.
        if len({_without_place(text) for text in error.labels}) > 1:
            raise
        op = team.sum_op(flat, label, scale, in_place=False)
        cache.lane.wait(ByCaller(team, WORKER, op, "all_reduce"))


def _compare(cache: GroupCache, label: bytes, tensor: torch.Tensor = _NOTHING) -> bool:
    """Raise `LabelsDiffer` on every rank unless all brought the same; whether all have it in one place of their memory.

    On one host a sum in memory does this in one go, and finds out about places itself.
    """
    lane = cache.lane
    if lane.one_host and lane.team is not None:
        lane.wait(ByCaller(lane.team, WORKER, lane.team.sum_op(_NOTHING, label), "all_reduce"))
        return True
    found = lane.team.locate(tensor) if lane.team is not None and tensor.is_cpu else None
    place = PLACE + b"%d+%x" % (found[0].number, found[1]) if found is not None else b""
    rows = lane.exchange((label + place)[:LABEL_NBYTES].ljust(LABEL_NBYTES), "the comparison of what the ranks brought")
    labels = [row.decode().rstrip() for row in rows]
    if len({_without_place(each) for each in labels}) > 1:
        raise LabelsDiffer(labels)
    return len(set(labels)) == 1


def _without_place(label: str) -> str:
    return label.split(PLACE.decode())[0]


@lru_cache(maxsize=1024)
def _checked_label(
    dtype: torch.dtype,
    shape: torch.Size,
    op: str,
    algorithm: Algorithm | None,
    compress: Compressor | None,
    device_type: str,
) -> bytes:
    """Return what ranks compare before any data moves; or raise, with the reason why such a call makes no sense."""
    if op not in ("mean", "sum"):
        raise ValueError(f'op must be "mean" or "sum", got {op!r}')
    if dtype == torch.bool:
        raise ValueError("torch.bool cannot be added up; pass tensor.int() instead")
    if dtype not in CODES and not dtype.is_complex:
        raise ValueError(f"{dtype} cannot be added up; pass a tensor of another dtype, tensor.float() say")
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f'the mean of {dtype} is not an integer; use op="sum" or a floating tensor')
    how = "" if algorithm is None else f" {algorithm}"
    if compress is not None:
        codec = compress.choose(Param("", tuple(shape), dtype)).label
        how += f" {codec}~{hashlib.sha256(repr(compress).encode()).hexdigest()[:6]}"
    where = "" if device_type == "cpu" else f" on {device_type}"
    return _label(dtype, shape, f"{op}{how}{where}")


def _label(dtype: torch.dtype, shape: Sequence[int], what: str) -> bytes:
    text = f"{str(dtype).removeprefix('torch.')}{list(shape)} {what}".encode()
    if len(text) > _TEXT_NBYTES:
        return text[: _TEXT_NBYTES - 9] + b"~" + hashlib.sha256(text).hexdigest()[:8].encode()
    return text


def _disagreement(labels: list[str], cache: GroupCache, what: str) -> Disagreement:
    lane = cache.lane
    members = lane.team.members if lane.one_host and lane.team is not None else range(lane.groups.size)
    ranks = lane.global_ranks(list(members))
    said = "; ".join(f"rank {rank}: {_without_place(text)}" for rank, text in zip(ranks, labels, strict=True))
    return Disagreement(f"{what} was called with different tensors ({said}); every rank must bring the same")


def _members_group(group: dist.ProcessGroup | None, what: str) -> dist.ProcessGroup:
    parent = dist.group.WORLD if group is None else group
    if parent is None:
        raise ValueError(f"there is no process group yet; call gs.init() before gs.{what}()")
    if not isinstance(parent, dist.ProcessGroup) or parent.rank() < 0:
        raise ValueError(f"this rank is not a member of the group given to {what}; only members may call it")
    return parent


def _check_form(tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        raise TypeError(
            f"all_reduce takes a dense torch tensor, got {getattr(tensor, 'layout', type(tensor).__name__)}"
        )
    if not tensor.is_contiguous() and any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise TypeError("all_reduce writes in place, which an expanded tensor does not allow; clone() it first")
