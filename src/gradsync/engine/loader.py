"""The batches of the user's loader, which may raise on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from gradsync.engine.dropped_batches import Aborted
from gradsync.trace.tracer import Tracer

T = TypeVar("T")


class Batches(Iterator[T]):
    """The batches of a loader, which may go on after it raised."""

    def __init__(self, source: Iterator[T], aborted: Aborted, tracer: Tracer | None) -> None:
        self._source = source
        self._aborted = aborted
        self._tracer = tracer

    def __iter__(self) -> Batches[T]:
        return self

    def __next__(self) -> T:
        begun = None if self._tracer is None else self._tracer.input_begins()
        try:
            batch = next(self._source)
        except StopIteration:
            raise
        except Exception as error:
            self._aborted.loader_did(error)
            raise
        self._aborted.batch_came()
        if self._tracer is not None and begun is not None:
            self._tracer.input_ends(begun)
        return batch
