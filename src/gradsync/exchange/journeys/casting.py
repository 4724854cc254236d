"""In 16 bits: cast, add up, cast back. Gradients were divided by the number of ranks, so sums do not overflow."""

from __future__ import annotations

import torch

from gradsync.compress.cast import Cast
from gradsync.exchange.circle import Circle
from gradsync.exchange.desk import Journey
from gradsync.exchange.memory import Form
from gradsync.exchange.parcel import Parcel
from gradsync.exchange.staging import Staged
from gradsync.trace.tally import Account


class Casting:
    """fp16 and bf16, with error feedback if asked for."""

    def __init__(self, parcel: Parcel, codec: Cast, circle: Circle, wire: torch.device, account: Account) -> None:
        """Every rank of the group makes it at once."""
        form = Form(parcel.flat.numel(), codec.dtype, wire)
        self.way = circle.sum_way(form)
        self.sent_nbytes = form.numel * form.dtype.itemsize * circle.sum_share(form)
        self._parcel = parcel
        self._circle = circle
        self._account = account
        self._payload = Staged.beside(circle.for_sums(form), parcel.flat.device)

    def go(self, step: int) -> Journey:
        flat, payload = self._parcel.flat, self._payload
        with self._account.timing("encode_s", flat.device):
            self._encode(flat, payload.near)
            payload.down()
        yield self._circle.sum(payload.wire, self._parcel.index)
        with self._account.timing("decode_s", flat.device):
            payload.up()
            flat.copy_(payload.near)

    def _encode(self, flat: torch.Tensor, payload: torch.Tensor) -> None:
        residual = self._parcel.residual
        if residual is None:
            payload.copy_(flat)
            return
        residual += flat
        payload.copy_(residual)
        residual -= payload
        residual.masked_fill_(~residual.isfinite(), 0)  # what overflowed is seen by the user, and gone afterwards
