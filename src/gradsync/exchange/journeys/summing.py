"""One sum of payloads: what compressors have in common whose payloads may be added up at once."""

from __future__ import annotations

from abc import ABC, abstractmethod

from gradsync.exchange.circle import Circle
from gradsync.exchange.desk import Journey
from gradsync.exchange.memory import Form
from gradsync.exchange.parcel import Parcel
from gradsync.exchange.staging import Staged
from gradsync.trace.tally import Account


class Summing(ABC):
    """Encode, add up, decode."""

    def __init__(self, parcel: Parcel, circle: Circle, form: Form, account: Account) -> None:
        """`form` is that of the payload on its way. Every rank of the group makes it at once."""
        self.way = circle.sum_way(form)
        self.sent_nbytes = form.numel * form.dtype.itemsize * circle.sum_share(form)
        self._parcel = parcel
        self._circle = circle
        self._account = account
        self._payload = Staged.beside(circle.for_sums(form), parcel.flat.device)

    def go(self, step: int) -> Journey:
        payload, device = self._payload, self._parcel.flat.device
        with self._account.timing("encode_s", device, self._parcel.spans):
            self._encode(step)
            payload.down()
        yield self._circle.sum(payload.wire, self._parcel.index)
        with self._account.timing("decode_s", device, self._parcel.spans):
            payload.up()
            self._decode()

    @abstractmethod
    def _encode(self, step: int) -> None:
        """The bucket and its residual into the payload."""

    @abstractmethod
    def _decode(self) -> None:
        """The sum of payloads into the bucket."""
