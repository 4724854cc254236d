"""A test of whether a batch that raised on this rank is tried again, or another one comes.

Note [Tried again]
    A forward that raised and is called again with the same input, a part of it, or from the `except` block of that very
    error, is the same batch: nothing was skipped. What the forward before had too (a mask, the edges of a graph) tells
    nothing, unless there is nothing else; nor does another slice of the tensor that holds all the data.

Note [A backward tried again]
    All ranks drop a batch whose backward raised, so what is computed of it once more must not count as another one.

    in the `except` block of that very error    it is that batch: its gradients come to nothing, with a warning
    after it, with the same input               it may be that batch, or another pass over this data: refused
    after `step()`, or a batch of sync.data()   it is another batch, and so after `load_state_dict()`

Note [Which error is handled]
    An error is not kept: its frames hold the tensors of the batch. What is kept is a number that it is given, for the
    address of one that is gone is soon that of another. Autograd does not say what it gave a backward up for, and we
    hear of it late, perhaps while another error is handled: the traceback tells which of them came out of a backward.
"""

from __future__ import annotations

import itertools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from gradsync.engine import loop_errors

Seen = tuple[weakref.ref[torch.Tensor], ...]
_numbers = itertools.count()


class Failed(NamedTuple):
    """A batch whose backward raised."""

    errors: frozenset[int]  # numbers of that exception and what it came of, if it was handled when we heard of it
    inputs: Seen
    before: Seen  # what the forward before this one was given


class Retries:
    """The batch whose backward raised, until another one comes: see [A backward tried again]."""

    def __init__(self, place: Callable[[], str]) -> None:
        self.inputs: Seen = ()  # of the last forward
        self.before: Seen = ()  # and of the one before that
        self.under_way = False  # what is computed now comes to nothing
        self._place = place
        self._handled: frozenset[int] = frozenset()  # exceptions that were handled already in the last forward
        self._failed: Failed | None = None
        self._over = False  # it was tried again, and `step()` was called

    def backward_raised(self) -> None:
        """A backward raised since the last forward."""
        errors = handled(_came_of_backward) - self._handled
        self._failed, self._over = Failed(errors, self.inputs, self.before), False

    @property
    def inside(self) -> bool:
        """True if this is the `except` block of that backward."""
        return self._failed is not None and bool(self._failed.errors & handled())

    def forward_comes(self, now: Sequence[torch.Tensor]) -> None:
        """A forward begins: of that batch, or of another one."""
        if self._failed is not None and self.inside:
            if self._over:
                raise loop_errors.another_inside(self._place())
            self._begin()
            return
        self.under_way = False
        if self._failed is not None and not self._over and is_part(self._failed.inputs, self._failed.before, now):
            raise loop_errors.tried_again(self._place())
        self._failed, self._over, self._handled = None, False, handled()
        self.before, self.inputs = self.inputs, tuple(map(weakref.ref, now))

    def backward_comes(self) -> bool:
        """A backward begins, perhaps without a forward: whether it is of that batch."""
        if not self.under_way and self.inside and not self._over:
            self._begin()
        return self.under_way

    def ended(self) -> None:
        """`step()` was called: what comes is another batch."""
        if not self.under_way and not self._over:
            self._failed = None
        self._over, self.under_way = self._failed is not None, False

    def another_batch(self) -> None:
        """The loader gave a batch, or all ranks continue from a state: what comes is in none that raised."""
        self._failed, self._over, self.under_way = None, False, False

    def _begin(self) -> None:
        if not self.under_way:
            warnings.warn(
                f"{self._place()} a batch whose backward raised was tried again: every rank drops it, so these "
                "gradients come to nothing; go on with the next batch, or catch the error around what cannot raise",
                stacklevel=5,
            )
        self.under_way = True


def number_of(error: BaseException) -> int:
    """The number of an error, which no other has: see [Which error is handled]."""
    number: int = vars(error).setdefault("_gradsync_number", next(_numbers))
    return number


def handled(which: Callable[[BaseException], bool] = lambda error: True) -> frozenset[int]:
    """The exceptions that are handled just now: the one, and those it came of."""
    return frozenset(number_of(error) for error in _chain(sys.exception()) if which(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _came_of_backward(error: BaseException) -> bool:
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_name == "_engine_run_backward":
            return True
        traceback = traceback.tb_next
    return False


def is_again(last: Seen, before: Seen, now: Iterable[torch.Tensor]) -> bool:
    """Return whether these are the inputs of the forward that raised, or a part of them: see [Tried again]."""
    places, raised = [_place(tensor) for tensor in now], _places(last)
    return any(_overlap(place, raised) for place in _telling(places, before) or places)


def is_part(last: Seen, before: Seen, now: Iterable[torch.Tensor]) -> bool:
    """Return whether these inputs are part of the last ones, where inputs that tell nothing tell nothing."""
    return any(_overlap(place, _places(last)) for place in _telling([_place(tensor) for tensor in now], before))


def _telling(places: list[TensorPlace], before: Seen) -> list[TensorPlace]:
    had = _places(before)
    return [place for place in places if not _overlap(place, had)]


class TensorPlace(NamedTuple):
    """The place in memory where a tensor lies."""

    home: object  # its storage
    begin: int
    end: int


def _places(seen: Seen) -> list[TensorPlace]:
    return [_place(tensor) for tensor in (each() for each in seen) if tensor is not None]


def _overlap(place: TensorPlace, others: Iterable[TensorPlace]) -> bool:
    return any(place.home == each.home and place.begin < each.end and each.begin < place.end for each in others)


def _place(tensor: torch.Tensor) -> TensorPlace:
    try:
        home = tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, or of a subclass without a storage
        home = 0
    if not home or not tensor.numel():
        return TensorPlace(("tensor", id(tensor)), 0, 1)
    begin = int(tensor.storage_offset())
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    # Images that a generator made and the same without their graph are two batches of a discriminator.
    origin = (home, tensor.grad_fn is not None)
    return TensorPlace(origin, begin * tensor.element_size(), (begin + last + 1) * tensor.element_size())
