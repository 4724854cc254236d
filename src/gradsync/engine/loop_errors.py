"""The sentences for what a loop may not do between two steps; `place` is where this rank is."""

from __future__ import annotations

from gradsync.errors import BackwardAborted, GradSyncError

_COMPILED = "if the whole model is under torch.compile, compile its blocks instead (block.compile())"


def differentiable(place: str) -> BackwardAborted:
    """A backward that makes a graph of itself."""
    return BackwardAborted(
        f"{place} backward(create_graph=True) cannot be averaged: the average would not be differentiable. Take the "
        "inner gradient with torch.autograd.grad(..., create_graph=True) and call backward() on the outer loss only"
    )


def segments(place: str) -> BackwardAborted:
    """A backward that ends several times."""
    return BackwardAborted(
        f"{place} reentrant checkpointing of a model whose parts are called one by one ends backward once per segment, "
        "so windows, weights and steps would be counted wrongly. Call the model itself, or use "
        "checkpoint(..., use_reentrant=False)"
    )


def weighed_late(place: str) -> GradSyncError:
    """Another weight, which is heard of when gradients have come."""
    return GradSyncError(
        f"{place} micro-batches that weigh differently need to be known before their gradients come: call the model "
        f"itself, not its parts; {_COMPILED}"
    )


def mixed_up(place: str) -> GradSyncError:
    """A backward whose beginning nobody announced, after one that raised."""
    return GradSyncError(
        f"{place} a backward raised, and another one has begun without a call of the model or of optimizer.step() "
        "between them, so their gradients cannot be told apart: after a backward that raised call optimizer.step(), "
        f"which applies nothing, or call the model itself and not its parts; {_COMPILED}"
    )


def local_step(place: str) -> GradSyncError:
    """A step in the middle of a window."""
    return GradSyncError(
        f"{place} optimizer.step() would apply gradients that only this rank has: its last backward ran under "
        "no_sync(). Run the last backward of a step outside of it, or call drain()"
    )


def local_drain(place: str) -> GradSyncError:
    """The end of training in the middle of a window, where nobody counts its backwards."""
    return GradSyncError(
        f"{place} the last backward ran under no_sync(), and this pace counts only others: run the last backward of a "
        "step outside of it, then call drain()"
    )


def tried_again(place: str) -> GradSyncError:
    """The input of a batch whose backward raised, after its `except` block."""
    return GradSyncError(
        f"{place} a backward raised, and the model is called again with the same input: if this batch is tried again, "
        "all ranks have dropped it, so leave it out (inside of the `except` block what is tried again comes to "
        "nothing); if it is another pass over the same data, call optimizer.step() before it, which applies nothing"
    )


def another_inside(place: str) -> GradSyncError:
    """A second batch in the `except` block of a backward that raised."""
    return GradSyncError(
        f"{place} another batch comes inside of the `except` block of a backward that raised: the one before it was "
        "taken to be that batch tried again, and came to nothing, so the ranks may be a batch apart; leave the "
        "`except` block before the next batch, or take batches from sync.data(loader)"
    )
