"""Blocks of a bucket, and where their codes lie in a payload. The family of codecs that code block by block.

    bucket     │ param a ───────────────────── │ param b ── │
    blocks     │ a0 │ a1 │ a2 │ a3 │ a4 (short)│ b0 │ b1    │     none crosses a parameter's border
    runs       │ a0   a1   a2 │ a3   a4        │ b0 │ b1    │     here for two owners: as equal as possible
    owner      │ 1            │ 0              │ 0  │ 1     │     (run + crc32(name)) % 2
    payload    │ heads a3 a4 b0 │ bodies a3 a4 b0 │ heads a0 a1 a2 b1 │ bodies a0 a1 a2 b1 │
               │ part 0                           │ part 1                                 │

Borders of blocks, owners and numbers of parameters depend on the parameter alone, so that a parameter's result
is the same, bit by bit, in whatever bucket it travels.

Payloads cannot be added up, so each is decoded. Two ways, whichever sends fewer bytes:

gather      everybody sends its whole payload to everybody, and decodes all: (n − 1) · c bytes, encoded once
two phases  everybody answers for a part: it gets that part of all payloads, adds them up, encodes the sum and
            sends it to all: 2 · (n − 1) / n · c bytes, encoded twice

With two ranks they send the same, so the first serves; in shared memory it sends nothing at all.

Note [What a sum loses]
    The second encoding loses something too. Who made it adds that to its own residual, in which it is sent with
    the next gradient. So whatever was not applied is in the residuals: Σ gradients == applied + Σ residuals.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gradsync.compress.param import Param, Span, number_of
from gradsync.compress.recipe import Codec
from gradsync.compress.rounds import CodedBucket, Compute, Gather, Rounds, Trade
from gradsync.kernels.block_kernels import ALIGN_NBYTES, BODY, HEAD, KEPT, BlockTable, Code, Mode, decode, encode

MIN_BLOCK = 32
_INT32_END = 1 << 31
_WAY_OUT = "make bucket_bytes smaller"
_IN_PAYLOAD = np.isin(np.arange(KEPT + 1), (HEAD, BODY)).astype(np.int64)  # the columns that move with a part

Ints = npt.NDArray[np.int64]


def two_phases_pay(size: int, in_memory: bool) -> bool:
    """Return whether two phases send fewer bytes than everybody's payload to everybody: 2 · (n − 1) / n < n − 1."""
    return size > 2 and not in_memory


class BlockCodec(Codec, ABC):
    """Codes each block by itself: a head (a scale, or indices) and a body."""

    block: int

    @abstractmethod
    def code(self) -> Code:
        """Return what the kernels are told."""

    @abstractmethod
    def head_nbytes(self, length: int) -> int:
        """The bytes of a block's head, a multiple of 4."""

    @abstractmethod
    def body_nbytes(self, length: int) -> int:
        """The bytes of a block's body, a multiple of 16."""

    def kept(self, length: int) -> int:
        """Return how many elements of a block are sent by index; 0: all of them, without."""
        return 0

    def key(self, step: int, salt: int = 0) -> int:
        """Return what rounding at random draws from; see `key_of`."""
        return 0

    def nbytes(self, param: Param) -> int:
        num_whole, rest = divmod(param.numel, self.block)
        blocks = [(num_whole, self.block), (1, rest)] if rest else [(num_whole, self.block)]
        heads = sum(count * self.head_nbytes(length) for count, length in blocks)
        return align(heads) + sum(count * self.body_nbytes(length) for count, length in blocks)

    def rounds(self, bucket: CodedBucket) -> Rounds:
        """The rounds of two phases where they pay, else of a gather: see the two ways above."""
        return (_two_phases if two_phases_pay(bucket.size, bucket.in_memory) else _gather)(self, bucket)


def _gather(codec: BlockCodec, bucket: CodedBucket) -> Rounds:
    """Everybody's payload to everybody."""
    code, claimed, rank = codec.code(), sum(map(codec.nbytes, bucket.params)), bucket.rank
    table = bucket.prepare(lambda: partition(codec, bucket.spans, 1, bucket.device).whole)
    rows = bucket.rows(bucket.size, lambda: table.nbytes, claimed)
    mine = bucket.prepare(lambda: rows.tensor[rank])

    def encode_mine(step: int) -> None:
        residual = bucket.residual
        mode = Mode.NONE if residual is None else Mode.FEEDBACK
        encode(code, bucket.flat, residual, table, mine, mode, codec.key(step, 2 * rank))

    yield Compute(encode_mine, encode=1)
    yield Gather(rows)
    yield Compute(lambda step: decode(code, rows.tensor, table, bucket.flat), decode=bucket.size)


def _two_phases(codec: BlockCodec, bucket: CodedBucket) -> Rounds:
    """Everybody's payload to who answers for it, and sums back."""
    code, claimed, rank, size = codec.code(), sum(map(codec.nbytes, bucket.params)), bucket.rank, bucket.size
    parts = bucket.prepare(lambda: partition(codec, bucket.spans, size, bucket.device))
    # Our payload, by who answers for it; and our part of everybody's, later the sums of all parts.
    mine = bucket.rows(size, lambda: parts.part_nbytes, claimed)
    theirs = bucket.rows(size, lambda: parts.part_nbytes, claimed / size)

    def encode_mine(step: int) -> None:
        residual = bucket.residual
        mode = Mode.NONE if residual is None else Mode.FEEDBACK
        encode(code, bucket.flat, residual, parts.whole, mine.tensor.view(-1), mode, codec.key(step, 2 * rank))

    def add_up(step: int) -> None:
        flat, residual, rows, part = bucket.flat, bucket.residual, theirs.tensor, parts.parts[rank]
        decode(code, rows, part, flat)
        mode = Mode.NONE if residual is None else Mode.ABSORB
        encode(code, flat, residual, part, rows[rank], mode, codec.key(step, 2 * rank + 1))

    yield Compute(encode_mine, encode=1)
    yield Trade(theirs, mine)
    yield Compute(add_up, encode=1 / size, decode=1)
    yield Gather(theirs)
    yield Compute(lambda step: decode(code, theirs.tensor.view(1, -1), parts.whole, bucket.flat), decode=1)


class Parts(NamedTuple):
    """A bucket's blocks, divided among owners."""

    whole: BlockTable  # all parts, one after the other
    parts: tuple[BlockTable, ...]  # each owner's, in bytes from the beginning of its part
    part_nbytes: int  # all parts of a payload are as long as the longest: so they can be traded and gathered


class Blocks(NamedTuple):
    """A row of numbers per block."""

    start: Ints  # its first element in the flat tensor
    length: Ints
    first: Ints  # its first element in the parameter
    param: Ints  # `number_of` the parameter
    ordinal: Ints  # which of the parameter's blocks it is
    num_blocks: Ints  # and of how many
    head_nbytes: Ints
    body_nbytes: Ints
    kept: Ints

    def take(self, which: Ints | slice) -> Blocks:
        return Blocks(*(column[which] for column in self))


def partition(codec: BlockCodec, spans: Sequence[Span], num_parts: int, device: torch.device | str = "cpu") -> Parts:
    """Divide a bucket's blocks among `num_parts` owners.

    >>> from gradsync.compress.integers import Int8
    >>> parts = partition(Int8(block=256), [Span("weight", 0, 1000), Span("bias", 1024, 10)], num_parts=2)
    >>> [len(part.rows) for part in parts.parts], parts.part_nbytes, parts.whole.nbytes
    ([2, 3], 544, 1088)
    """
    if any(span.start + span.numel >= _INT32_END for span in spans):
        raise ValueError(f"a bucket of {codec.name} must have less than 2^31 elements; {_WAY_OUT}")
    blocks = blocks_of(codec, spans)
    owner = owners(blocks, num_parts)
    order = np.argsort(owner, kind="stable")
    borders = np.searchsorted(owner[order], np.arange(num_parts + 1)).tolist()
    parts = [build_rows(blocks.take(order[first:last])) for first, last in pairwise(borders)]
    part_nbytes = max(nbytes for _, nbytes in parts)
    whole_nbytes = num_parts * part_nbytes
    if whole_nbytes >= _INT32_END:
        raise ValueError(f"a payload of {codec.name} must have less than 2^31 bytes, got {whole_nbytes}; {_WAY_OUT}")
    begins = np.arange(num_parts) * part_nbytes
    rows = np.concatenate([part for part, _ in parts])
    whole = _on(device, rows + np.repeat(begins, np.diff(borders))[:, None] * _IN_PAYLOAD)
    split = _on(device, rows).split(np.diff(borders).tolist())
    tables = (BlockTable(part, nbytes) for part, (_, nbytes) in zip(split, parts, strict=True))
    return Parts(BlockTable(whole, whole_nbytes), tuple(tables), part_nbytes)


def blocks_of(codec: BlockCodec, spans: Sequence[Span]) -> Blocks:
    """The blocks of each parameter, in the order of the bucket."""
    start = np.array([span.start for span in spans], np.int64)
    numel = np.array([span.numel for span in spans], np.int64)
    param = np.array([number_of(span.name) for span in spans], np.int64)
    num_blocks = -(-numel // codec.block)
    of = np.repeat(np.arange(len(spans)), num_blocks)
    ordinal = np.arange(len(of)) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)
    first = ordinal * codec.block
    length = np.minimum(codec.block, numel[of] - first)
    # Few lengths differ: whole blocks, and each parameter's last one.
    lengths, which = np.unique(length, return_inverse=True)
    sizes = [(codec.head_nbytes(n), codec.body_nbytes(n), codec.kept(n)) for n in lengths.tolist()]
    head, body, kept = np.array(sizes, np.int64).reshape(-1, 3)[which].T
    return Blocks(start[of] + first, length, first, param[of], ordinal, num_blocks[of], head, body, kept)


def owners(blocks: Blocks, num_parts: int) -> Ints:
    """Return who sums up each block: a parameter's blocks in runs as equal as possible, the longer ones first."""
    size, num_longer = np.divmod(blocks.num_blocks, num_parts)
    in_longer = num_longer * (size + 1)
    run = np.where(
        blocks.ordinal < in_longer,
        blocks.ordinal // (size + 1),
        num_longer + (blocks.ordinal - in_longer) // np.maximum(size, 1),
    )
    # Begin elsewhere for each parameter: the many that have a single block would all fall to owner 0.
    return (run + blocks.param) % num_parts


def build_rows(blocks: Blocks) -> tuple[Ints, int]:
    """The rows of a `BlockTable`, as int64, and the bytes of their payload."""
    bodies_begin = align(int(blocks.head_nbytes.sum()))
    head = np.cumsum(blocks.head_nbytes) - blocks.head_nbytes
    body = np.cumsum(blocks.body_nbytes) - blocks.body_nbytes + bodies_begin
    rows = np.stack([blocks.start, blocks.length, head, body, blocks.first, blocks.param, blocks.kept], axis=1)
    return rows, bodies_begin + int(blocks.body_nbytes.sum())


def align(nbytes: int, to: int = ALIGN_NBYTES) -> int:
    """Rounded up.

    >>> align(1), align(16), align(6, 4)
    (16, 16, 8)
    """
    return -(-nbytes // to) * to


def _on(device: torch.device | str, rows: Ints) -> torch.Tensor:
    # By way of uint32: the number of a parameter has 32 bits.
    return torch.from_numpy(rows.astype(np.uint32).view(np.int32)).to(device)
