"""In 16 bits: cast, add up, cast back. Gradients were divided by the number of ranks, so sums do not overflow."""

from __future__ import annotations

import torch

from gradsync.compress.cast import Cast
from gradsync.exchange.circle import Circle
from gradsync.exchange.journeys.summing import Summing
from gradsync.exchange.memory import Form
from gradsync.exchange.parcel import Parcel
from gradsync.trace.tally import Account


class Casting(Summing):
    """fp16 and bf16, with error feedback if asked for."""

    def __init__(self, parcel: Parcel, codec: Cast, circle: Circle, wire: torch.device, account: Account) -> None:
        """Every rank of the group makes it at once."""
        super().__init__(parcel, circle, Form(parcel.flat.numel(), codec.dtype, wire), account)

    def _encode(self, step: int) -> None:
        flat, residual, payload = self._parcel.flat, self._parcel.residual, self._payload.near
        if residual is None:
            payload.copy_(flat)
            return
        residual += flat
        payload.copy_(residual)
        residual -= payload
        residual.masked_fill_(~residual.isfinite(), 0)  # what overflowed is seen by the user, and gone afterwards

    def _decode(self) -> None:
        self._parcel.flat.copy_(self._payload.near)
