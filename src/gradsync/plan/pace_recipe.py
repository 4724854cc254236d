"""Each pace as the others know it: which exchange it makes, as data, when, and over how many steps.

    DuringBackward     forward │ backward             │ optimizer     gradients, in each backward
    DuringWindow               │ ════ exchange ══════ │               or in the last one of a window
    DuringNextStep     forward │ backward │ optimizer                 gradients of k steps ago, beside a whole step
                       ══════════ exchange ══════════
    BetweenSteps       step … step │ exchange │ step … step           parameters, by the plan's all-reduce
    WithNeighbour      step … step │ messages │ step … step           parameters, to one other rank
    WithOwners         step │ messages │ step │ messages │            gradients to the ranks that keep parameters

Each pace says it once. The plan refuses by it what makes no sense together, the planner prices it, the engine and the
adapters ask it what a step leaves in `.grad`: nobody else asks which pace there is.

Recipes stand here, below the planner and below everything that sends. What is at work is in `pace/`, far above, and a
recipe knows it by its name only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Protocol, runtime_checkable


class Exchange:
    """Data on what the ranks do together; what is said here holds for one that says nothing else."""

    of_gradients: ClassVar[bool] = False  # every rank applies the same ones; else ranks keep parameters of their own
    takes_gradients: ClassVar[bool] = False  # out of `.grad`, as the optimizer is about to step
    follows_steps: ClassVar[bool] = True  # so it has to know the optimizer
    all_reduces: ClassVar[bool] = True  # by the plan's algorithm, and with its compressor
    every_backward: ClassVar[bool] = False  # each ends with the mean, as with DDP
    steps_alike: ClassVar[bool] = False  # one takes as long as another
    waits_for: ClassVar[str | None] = None  # whom a rank waits for, where that is not the last of all ranks
    some_steps_empty: ClassVar[bool] = False  # the optimizer finds no gradient at all in them

    @property
    def window(self) -> int | None:
        """The number of micro-batches that the loop brings for a step of the optimizer; None: the pace counts none."""
        return None


@dataclass(frozen=True)
class DuringBackward(Exchange):
    """Gradients, while each backward computes."""

    of_gradients = True
    follows_steps = False
    every_backward = True
    steps_alike = True


@dataclass(frozen=True)
class DuringWindow(Exchange):
    """Gradients, while the last backward of a window computes; they are the sum of all its micro-batches."""

    of_gradients = True
    follows_steps = False
    some_steps_empty = True

    micro_batches: int

    @property
    def window(self) -> int:
        return self.micro_batches


@dataclass(frozen=True)
class DuringNextStep(Exchange):
    """Gradients, beside all that a step computes; each is applied so many steps later."""

    of_gradients = True
    steps_alike = True
    some_steps_empty = True

    delay: int


@dataclass(frozen=True)
class BetweenSteps(Exchange):
    """Parameters, after so many steps: in fragments of equal size, each hidden behind `delay` steps.

    `copies` of them are kept in float32, and for each exchange they are read or written `passes` times.
    """

    steps: int
    fragments: int = 1
    delay: int = 0
    copies: int = 0
    passes: int = 0


@dataclass(frozen=True)
class WithNeighbour(Exchange):
    """Parameters, all of them, to one other rank and from one, after so many steps."""

    all_reduces = False
    waits_for = "a neighbour"

    steps: int


@dataclass(frozen=True)
class WithOwners(Exchange):
    """A part of the gradients to each rank, and the parameters that it keeps back from it, in every step."""

    takes_gradients = True
    all_reduces = False
    waits_for = "the parameters' owners"


class PaceRecipe(ABC):
    """The recipe that stands in `Plan(pace=...)`: a frozen dataclass that says what it exchanges, and how it begins."""

    at_work: ClassVar[str]  # "module:what", below `gradsync.pace`: what makes the pace of a recipe and a context

    @abstractmethod
    def exchange(self) -> Exchange:
        """Return what the ranks do together, and when."""

    def open(self, context: Any) -> Any:
        """Return the `pace.contract.Pace` at work in a `pace.contract.PaceContext`; every rank calls this at once."""
        module, _, made_by = self.at_work.partition(":")
        return getattr(import_module(f"gradsync.pace.{module}"), made_by)(self, context)


@runtime_checkable
class OwnPace(Protocol):
    """A pace from outside of this package: a frozen dataclass that knows how to begin."""

    @property
    def steps(self) -> int:
        """The steps from one exchange of parameters to the next, over which a planner spreads its price."""

    def open(self, context: Any) -> Any:
        """Return the `pace.contract.Pace` at work in a `pace.contract.PaceContext`; every rank calls this at once."""


Pace = PaceRecipe | OwnPace


def exchange_of(pace: Pace) -> Exchange:
    """Return what a pace exchanges; of one from outside that tells its steps alone, parameters after so many."""
    return pace.exchange() if isinstance(pace, PaceRecipe) else BetweenSteps(pace.steps)
