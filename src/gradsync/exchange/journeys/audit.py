"""What compression does to these gradients: now and then the exact sum travels too, and the two are compared."""

from __future__ import annotations

from gradsync.exchange.circle import Circle
from gradsync.exchange.desk import Journey
from gradsync.exchange.parcel import Parcel
from gradsync.trace.tally import Tally


def audited(journey: Journey, parcel: Parcel, everybody: Circle, tally: Tally, step: int) -> Journey:
    """The same journey, and after it one more round for the exact sum."""
    exact = parcel.flat.clone()
    yield from journey
    yield everybody.sum(exact, parcel.index)
    tally.audit(step, parcel.flat, exact)
