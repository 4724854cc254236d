"""Block by block: payloads cannot be added up, so each is decoded. Two ways, whichever sends fewer bytes.

gather      everybody sends its whole payload to everybody, and decodes all: (n − 1) · c bytes, encoded once
two_phase   everybody answers for a part: it gets that part of all payloads, adds them up, encodes the sum and
            sends it to all: 2 · (n − 1) / n · c bytes, encoded twice

With two ranks they send the same, so the first serves; in shared memory it sends nothing at all.

Note [What a sum loses]
    The second encoding loses something too. Who made it adds that to its own residual, in which it is sent with
    the next gradient. So whatever was not applied is in the residuals: Σ gradients == applied + Σ residuals.
"""

from __future__ import annotations

import torch

from gradsync.compress.blocks import BlockCodec, partition
from gradsync.exchange.flat import FlatBucket
from gradsync.exchange.participants import Participants
from gradsync.exchange.pinned import Staged
from gradsync.exchange.pipeline import Journey
from gradsync.kernels.block_kernels import Mode, decode, encode
from gradsync.trace.tally import CodecTally


class Gathering:
    """Everybody's payload to everybody."""

    way = "gather"

    def __init__(
        self,
        flat_bucket: FlatBucket,
        codec: BlockCodec,
        participants: Participants,
        wire: torch.device,
        account: CodecTally,
    ) -> None:
        """Every rank of the group makes it at once."""
        self._flat_bucket, self._codec, self._participants, self._account = flat_bucket, codec, participants, account
        self._table = partition(codec, [item.span for item in flat_bucket.items], 1, flat_bucket.flat.device).whole
        rows = participants.for_gathering((participants.size, self._table.nbytes), wire)
        self._rows = Staged.beside(rows, flat_bucket.flat.device)
        self.sent_nbytes = 0.0 if participants.in_memory else float((participants.size - 1) * self._table.nbytes)

    def go(self, step: int) -> Journey:
        flat_bucket, rows, code = self._flat_bucket, self._rows, self._codec.code()
        with self._account.timing("encode_s", flat_bucket.flat.device, flat_bucket.spans):
            mine = rows.near[self._participants.rank]
            mode = Mode.NONE if flat_bucket.residual is None else Mode.FEEDBACK
            key = self._codec.key(step, 2 * self._participants.rank)
            encode(code, flat_bucket.flat, flat_bucket.residual, self._table, mine, mode, key)
            rows.down(self._participants.rank)
        yield self._participants.gather(rows.wire, flat_bucket.index)
        with self._account.timing("decode_s", flat_bucket.flat.device, flat_bucket.spans):
            rows.up()
            decode(code, rows.near, self._table, flat_bucket.flat)


class TwoPhases:
    """Everybody's payload to who answers for it, and sums back."""

    way = "two_phase"

    def __init__(
        self,
        flat_bucket: FlatBucket,
        codec: BlockCodec,
        participants: Participants,
        wire: torch.device,
        account: CodecTally,
    ) -> None:
        """Every rank of the group makes it at once."""
        self._flat_bucket, self._codec, self._participants, self._account = flat_bucket, codec, participants, account
        device = flat_bucket.flat.device
        parts = partition(codec, [item.span for item in flat_bucket.items], participants.size, device)
        self._whole, self._part = parts.whole, parts.parts[participants.rank]
        shape = (participants.size, parts.part_nbytes)
        # Our payload, by who answers for it; and our part of everybody's, later the sums of all parts.
        self._mine = Staged.beside(participants.for_gathering(shape, wire), device)
        self._theirs = Staged.beside(participants.for_gathering(shape, wire), device)
        self.sent_nbytes = 2.0 * (participants.size - 1) * parts.part_nbytes

    def go(self, step: int) -> Journey:
        flat_bucket, code, rank = self._flat_bucket, self._codec.code(), self._participants.rank
        flat, residual, mine, theirs = flat_bucket.flat, flat_bucket.residual, self._mine, self._theirs
        with self._account.timing("encode_s", flat.device, flat_bucket.spans):
            mode = Mode.NONE if residual is None else Mode.FEEDBACK
            encode(code, flat, residual, self._whole, mine.near.view(-1), mode, self._codec.key(step, 2 * rank))
            mine.down()
        yield self._participants.trade(theirs.wire, mine.wire.view(-1), flat_bucket.index)
        with self._account.timing("encode_s", flat.device, flat_bucket.spans):
            theirs.up()
            decode(code, theirs.near, self._part, flat)
            mode = Mode.NONE if residual is None else Mode.ABSORB
            encode(code, flat, residual, self._part, theirs.near[rank], mode, self._codec.key(step, 2 * rank + 1))
            theirs.down(rank)
        yield self._participants.gather(theirs.wire, flat_bucket.index)
        with self._account.timing("decode_s", flat.device, flat_bucket.spans):
            theirs.up()
            decode(code, theirs.near.view(1, -1), self._whole, flat)
