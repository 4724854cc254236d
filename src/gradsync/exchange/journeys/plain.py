"""As it is: one sum."""

from __future__ import annotations

from gradsync.exchange.circle import Circle
from gradsync.exchange.desk import Journey
from gradsync.exchange.memory import Form
from gradsync.exchange.parcel import Parcel


class Plain:
    """Nothing is done to it."""

    def __init__(self, parcel: Parcel, circle: Circle) -> None:
        form = Form(parcel.flat.numel(), parcel.flat.dtype, parcel.flat.device)
        self.way = circle.sum_way(form)
        self.sent_nbytes = parcel.nbytes * circle.sum_share(form)
        self._parcel = parcel
        self._circle = circle

    def go(self, step: int) -> Journey:
        yield self._circle.sum(self._parcel.flat, self._parcel.index)
