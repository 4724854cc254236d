"""One sum of payloads: what compressors have in common whose payloads may be added up at once."""

from __future__ import annotations

from abc import ABC, abstractmethod

from gradsync.exchange.flat import FlatBucket, Form
from gradsync.exchange.participants import Participants
from gradsync.exchange.pinned import Staged
from gradsync.exchange.pipeline import Journey
from gradsync.trace.tally import CodecTally


class Summing(ABC):
    """Encode, add up, decode."""

    def __init__(self, flat_bucket: FlatBucket, participants: Participants, form: Form, account: CodecTally) -> None:
        """`form` is that of the payload on its way. Every rank of the group makes it at once."""
        self.way = participants.sum_way(form)
        self.sent_nbytes = form.numel * form.dtype.itemsize * participants.sum_share(form)
        self._flat_bucket = flat_bucket
        self._participants = participants
        self._account = account
        self._payload = Staged.beside(participants.for_sums(form), flat_bucket.flat.device)

    def go(self, step: int) -> Journey:
        payload, device = self._payload, self._flat_bucket.flat.device
        with self._account.timing("encode_s", device, self._flat_bucket.spans):
            self._encode(step)
            payload.down()
        yield self._participants.sum(payload.wire, self._flat_bucket.index)
        with self._account.timing("decode_s", device, self._flat_bucket.spans):
            payload.up()
            self._decode()

    @abstractmethod
    def _encode(self, step: int) -> None:
        """The bucket and its residual into the payload."""

    @abstractmethod
    def _decode(self) -> None:
        """The sum of payloads into the bucket."""
