"""A number of 64 bits for the bytes of a tensor: equal bytes have equal digests, wherever they are computed.

On the CPU the C library does it at about the speed of memory, on a GPU Triton does; `reference` is what both compute,
in torch, and what serves where neither is at hand.

Note [Digest]
    The bytes in logical order as words w₀, w₁ … of 8 bytes, the lowest first, the last one filled up with zeros.

    digest = length in bytes + Σ mixed(wᵢ xor (i + 1) · STRIDE)      modulo 2⁶⁴

    mixed(x):  x ^= x >> 32;  x *= FIRST;  x ^= x >> 29;  x *= SECOND;  x ^= x >> 32

    Every step of `mixed` can be undone, so another word gives another summand: whatever changes inside of one word, a
    flipped bit among it, changes the digest for certain. Words that change places, or several that change, go
    unnoticed once in about 2⁶⁴. It is no defence against somebody who wants to deceive.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec

import torch

from gradsync.kernels.library import load

STRIDE, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
WORD_NBYTES = 8
_ALL = (1 << 64) - 1
_AT_ONCE = 1 << 21  # words: what the reference needs beside them is three times as much


def digest(tensor: torch.Tensor) -> int:
    """The digest of a tensor of any dtype; this waits for one on a GPU.

    >>> a = torch.tensor([1.0, 2.0, 3.0])
    >>> digest(a) == digest(a.clone()), digest(a) == digest(a.flip(0)), digest(a) == digest(-a)
    (True, False, False)
    """
    library = load() if tensor.device.type == "cpu" else None
    if library is None:
        return int(launch(tensor)) & _ALL
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return int(library.gradsync_digest(flat.data_ptr(), flat.numel() * flat.element_size()))


def launch(tensor: torch.Tensor) -> torch.Tensor:
    """The digest as an int64 tensor of no dimension on the tensor's device, without waiting for it."""
    if tensor.is_cuda and (on_gpu := _by_triton()) is not None:
        return on_gpu(words_of(tensor), _nbytes(tensor))
    return reference(tensor)


@lru_cache(maxsize=1)
def _by_triton() -> Callable[[torch.Tensor, int], torch.Tensor] | None:
    """Return what launches the kernel; None where there is no Triton."""
    found: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    if find_spec("triton"):
        found = import_module("gradsync.kernels.digest_triton").launch
    return found


def reference(tensor: torch.Tensor) -> torch.Tensor:
    """The digest in torch, as [Digest] says; in parts, so that little memory is needed."""
    words = words_of(tensor)
    total = torch.full((), _nbytes(tensor), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), _AT_ONCE):
        part = words[start : start + _AT_ONCE]
        x = torch.arange(start + 1, start + 1 + len(part), device=part.device)
        x.mul_(signed(STRIDE)).bitwise_xor_(part)
        _shift(x, 32).mul_(signed(FIRST))
        _shift(x, 29).mul_(signed(SECOND))
        total += _shift(x, 32).sum()
    return total


def joined(digests: list[int]) -> int:
    """One digest of several, in their order; another one in any of their places changes it for certain.

    >>> joined([1, 2]) == joined([2, 1]), joined([7]) == 7
    (False, False)
    """
    total = len(digests)
    for each in digests:
        total = (total ^ each) * FIRST & _ALL
        total ^= total >> 32
    return total


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes as int64; a copy where they do not lie as they must."""
    raw = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
    if short := -raw.numel() % WORD_NBYTES:
        raw = torch.cat([raw, raw.new_zeros(short)])
    elif raw.storage_offset() % WORD_NBYTES or raw.data_ptr() % WORD_NBYTES:
        raw = raw.clone()
    return raw.view(torch.int64)


def signed(number: int) -> int:
    """The int64 with the same bits.

    >>> signed(5), signed(2**64 - 1)
    (5, -1)
    """
    return number - (1 << 64) if number >> 63 else number


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _shift(x: torch.Tensor, by: int) -> torch.Tensor:
    """x ^= x >> by, in place, with zeros from the left."""
    return x.bitwise_xor_((x >> by).bitwise_and_((1 << 64 - by) - 1))
