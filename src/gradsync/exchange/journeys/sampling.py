"""A few elements, the same on every rank, so that they can be added up."""

from __future__ import annotations

import torch

from gradsync.compress.randomk import RandomK, payload_dtype
from gradsync.exchange.circle import Circle
from gradsync.exchange.desk import Journey
from gradsync.exchange.memory import Form
from gradsync.exchange.parcel import Parcel
from gradsync.exchange.staging import Staged
from gradsync.trace.tally import Account


class Sampling:
    """Random-k."""

    def __init__(self, parcel: Parcel, codec: RandomK, circle: Circle, wire: torch.device, account: Account) -> None:
        """Every rank of the group makes it at once."""
        self._strata = codec.strata([item.span for item in parcel.items], parcel.flat.device)
        form = Form(self._strata.begin.numel(), payload_dtype(parcel.flat.dtype), wire)
        self.way = circle.sum_way(form)
        self.sent_nbytes = form.numel * form.dtype.itemsize * circle.sum_share(form)
        self._parcel = parcel
        self._circle = circle
        self._account = account
        self._payload = Staged.beside(circle.for_sums(form), parcel.flat.device)
        # Without feedback an element stands for all of its stratum.
        self._weight = self._strata.length.to(torch.float32) if not parcel.choice.feedback else None

    def go(self, step: int) -> Journey:
        flat, payload = self._parcel.flat, self._payload
        with self._account.timing("encode_s", flat.device):
            places = self._strata.indices(step)
            self._encode(flat, places, payload.near)
            payload.down()
        yield self._circle.sum(payload.wire, self._parcel.index)
        with self._account.timing("decode_s", flat.device):
            payload.up()
            flat.zero_()
            flat.index_copy_(0, places, payload.near.to(flat.dtype))

    def _encode(self, flat: torch.Tensor, places: torch.Tensor, payload: torch.Tensor) -> None:
        residual = self._parcel.residual
        if residual is not None:
            residual += flat
        values = flat if residual is None else residual
        # A NaN anywhere must be seen, though its place may not be drawn; the residual is clean again afterwards.
        spoiled = ~torch.linalg.vector_norm(values, torch.inf).isfinite()
        drawn = values[places].float() if self._weight is None else values[places] * self._weight
        payload.copy_(drawn.masked_fill(spoiled, torch.nan))
        if residual is not None:
            residual.index_copy_(0, places, drawn - payload.float())  # what a half type rounded away
            residual.masked_fill_(spoiled, 0)
