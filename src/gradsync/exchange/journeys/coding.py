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
from gradsync.exchange.circle import Circle
from gradsync.exchange.desk import Journey
from gradsync.exchange.parcel import Parcel
from gradsync.exchange.staging import Staged
from gradsync.kernels.blocks import Mode, decode, encode
from gradsync.trace.tally import Account


class Gathering:
    """Everybody's payload to everybody."""

    way = "gather"

    def __init__(self, parcel: Parcel, codec: BlockCodec, circle: Circle, wire: torch.device, account: Account) -> None:
        """Every rank of the group makes it at once."""
        self._parcel, self._codec, self._circle, self._account = parcel, codec, circle, account
        self._table = partition(codec, [item.span for item in parcel.items], 1, parcel.flat.device).whole
        rows = circle.for_gathering((circle.size, self._table.nbytes), wire)
        self._rows = Staged.beside(rows, parcel.flat.device)
        self.sent_nbytes = 0.0 if circle.in_memory else float((circle.size - 1) * self._table.nbytes)

    def go(self, step: int) -> Journey:
        parcel, rows, code = self._parcel, self._rows, self._codec.code()
        with self._account.timing("encode_s", parcel.flat.device, parcel.spans):
            mine = rows.near[self._circle.rank]
            mode = Mode.NONE if parcel.residual is None else Mode.FEEDBACK
            key = self._codec.key(step, 2 * self._circle.rank)
            encode(code, parcel.flat, parcel.residual, self._table, mine, mode, key)
            rows.down(self._circle.rank)
        yield self._circle.gather(rows.wire, parcel.index)
        with self._account.timing("decode_s", parcel.flat.device, parcel.spans):
            rows.up()
            decode(code, rows.near, self._table, parcel.flat)


class TwoPhases:
    """Everybody's payload to who answers for it, and sums back."""

    way = "two_phase"

    def __init__(self, parcel: Parcel, codec: BlockCodec, circle: Circle, wire: torch.device, account: Account) -> None:
        """Every rank of the group makes it at once."""
        self._parcel, self._codec, self._circle, self._account = parcel, codec, circle, account
        device = parcel.flat.device
        parts = partition(codec, [item.span for item in parcel.items], circle.size, device)
        self._whole, self._part = parts.whole, parts.parts[circle.rank]
        shape = (circle.size, parts.part_nbytes)
        # Our payload, by who answers for it; and our part of everybody's, later the sums of all parts.
        self._mine = Staged.beside(circle.for_gathering(shape, wire), device)
        self._theirs = Staged.beside(circle.for_gathering(shape, wire), device)
        self.sent_nbytes = 2.0 * (circle.size - 1) * parts.part_nbytes

    def go(self, step: int) -> Journey:
        parcel, code, rank = self._parcel, self._codec.code(), self._circle.rank
        flat, residual, mine, theirs = parcel.flat, parcel.residual, self._mine, self._theirs
        with self._account.timing("encode_s", flat.device, parcel.spans):
            mode = Mode.NONE if residual is None else Mode.FEEDBACK
            encode(code, flat, residual, self._whole, mine.near.view(-1), mode, self._codec.key(step, 2 * rank))
            mine.down()
        yield self._circle.trade(theirs.wire, mine.wire.view(-1), parcel.index)
        with self._account.timing("encode_s", flat.device, parcel.spans):
            theirs.up()
            decode(code, theirs.near, self._part, flat)
            mode = Mode.NONE if residual is None else Mode.ABSORB
            encode(code, flat, residual, self._part, theirs.near[rank], mode, self._codec.key(step, 2 * rank + 1))
            theirs.down(rank)
        yield self._circle.gather(theirs.wire, parcel.index)
        with self._account.timing("decode_s", flat.device, parcel.spans):
            theirs.up()
            decode(code, theirs.near.view(1, -1), self._whole, flat)
