"""In 16 bits: cast, add up, cast back. Gradients were divided by the number of ranks, so sums do not overflow."""

from __future__ import annotations

import torch

from gradsync.compress.cast import Cast
from gradsync.exchange.flat import FlatBucket, Form
from gradsync.exchange.journeys.summing import Summing
from gradsync.exchange.participants import Participants
from gradsync.trace.tally import CodecTally


class Casting(Summing):
    """fp16 and bf16, with error feedback if asked for."""

    def __init__(
        self, flat_bucket: FlatBucket, codec: Cast, participants: Participants, wire: torch.device, account: CodecTally
    ) -> None:
        """Every rank of the group makes it at once."""
        super().__init__(flat_bucket, participants, Form(flat_bucket.flat.numel(), codec.dtype, wire), account)

    def _encode(self, step: int) -> None:
        flat, residual, payload = self._flat_bucket.flat, self._flat_bucket.residual, self._payload.near
        if residual is None:
            payload.copy_(flat)
            return
        residual += flat
        payload.copy_(residual)
        residual -= payload
        residual.masked_fill_(~residual.isfinite(), 0)  # what overflowed is seen by the user, and gone afterwards

    def _decode(self) -> None:
        self._flat_bucket.flat.copy_(self._payload.near)
