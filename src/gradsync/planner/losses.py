"""The effect of compression on a loss where it was measured: the one number that no prediction of seconds has.

Held-out loss against exact averaging of the same seed, the mean of three seeds, after 1000 steps of a transformer of
10.8 million parameters on 2 replicas. It is one model and one text: another one may lose more, or less.
"""

from __future__ import annotations

from typing import NamedTuple

from gradsync.compress.cast import bf16
from gradsync.compress.integers import int4, int8
from gradsync.compress.powersgd import powersgd
from gradsync.compress.randomk import randomk
from gradsync.compress.recipe import Compressor
from gradsync.compress.sign import sign
from gradsync.compress.topk import topk
from gradsync.compress.wrappers import across_hosts

SOURCE = "benchmarks/slow_link, 2 replicas, large, batch 32, 1000 steps"  # a test compares
CLOSE = 0.01  # of the loss: nobody would call that worse


class Loss(NamedTuple):
    """The share by which the loss was higher than that of exact averaging; None: not measured with that optimizer."""

    adamw: float
    sgd: float | None

    @property
    def close(self) -> bool:
        """True if the loss was within 1 % under every optimizer that was tried."""
        return max(self.adamw, self.sgd or 0.0) <= CLOSE


_MEASURED: tuple[tuple[Compressor, Loss], ...] = (
    (bf16(), Loss(0.0000, None)),
    (int8(), Loss(0.0001, 0.0001)),
    (int4(), Loss(0.0031, 0.0072)),
    (sign(), Loss(0.1311, 0.0154)),
    (powersgd(4), Loss(0.1841, 0.0702)),
    (powersgd(16), Loss(0.0322, 0.0184)),
    (topk(0.01), Loss(0.9943, None)),
    (randomk(0.01), Loss(1.6067, None)),
)


def measured_loss(compress: Compressor | None) -> Loss | None:
    """Return what this compressor did, between hosts or everywhere; None if nobody has measured it.

    >>> measured_loss(int4()), measured_loss(powersgd(4)).close
    (Loss(adamw=0.0031, sgd=0.0072), False)
    """
    if compress is None:
        return Loss(0.0, 0.0)
    return next((loss for recipe, loss in _MEASURED if compress in (recipe, across_hosts(recipe))), None)
