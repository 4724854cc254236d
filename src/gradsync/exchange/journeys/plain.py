"""As it is: one sum."""

from __future__ import annotations

from gradsync.exchange.flat import FlatBucket, Form
from gradsync.exchange.participants import Participants
from gradsync.exchange.pipeline import Journey


class Plain:
    """Nothing is done to it."""

    def __init__(self, flat_bucket: FlatBucket, participants: Participants) -> None:
        form = Form(flat_bucket.flat.numel(), flat_bucket.flat.dtype, flat_bucket.flat.device)
        self.way = participants.sum_way(form)
        self.sent_nbytes = flat_bucket.nbytes * participants.sum_share(form)
        self._flat_bucket = flat_bucket
        self._participants = participants

    def go(self, step: int) -> Journey:
        yield self._participants.sum(self._flat_bucket.flat, self._flat_bucket.index)
