"""A few elements, the same on every rank, so that they can be added up."""

from __future__ import annotations

import torch

from gradsync.compress.randomk import RandomK, payload_dtype
from gradsync.exchange.flat import FlatBucket, Form
from gradsync.exchange.journeys.summing import Summing
from gradsync.exchange.participants import Participants
from gradsync.trace.tally import CodecTally


class Sampling(Summing):
    """Random-k."""

    def __init__(
        self,
        flat_bucket: FlatBucket,
        codec: RandomK,
        participants: Participants,
        wire: torch.device,
        account: CodecTally,
    ) -> None:
        """Every rank of the group makes it at once."""
        self._strata = codec.strata([item.span for item in flat_bucket.items], flat_bucket.flat.device)
        self._places = self._strata.begin  # those drawn in the step under way
        # Without feedback an element stands for all of its stratum.
        self._weight = self._strata.length.to(torch.float32) if not flat_bucket.choice.feedback else None
        form = Form(self._strata.begin.numel(), payload_dtype(flat_bucket.flat.dtype), wire)
        super().__init__(flat_bucket, participants, form, account)

    def _encode(self, step: int) -> None:
        flat, residual, payload = self._flat_bucket.flat, self._flat_bucket.residual, self._payload.near
        self._places = places = self._strata.indices(step)
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

    def _decode(self) -> None:
        flat = self._flat_bucket.flat
        flat.zero_()
        flat.index_copy_(0, self._places, self._payload.near.to(flat.dtype))
