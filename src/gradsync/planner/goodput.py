"""The part of a run that failures leave: how often one comes, how often to save, which share of it is progress."""

from __future__ import annotations

import math
from typing import NamedTuple


class Goodput(NamedTuple):
    """The part that is left of a run that every failure stops."""

    mtbf_s: float  # from one failure to the next
    interval_s: float  # work between two checkpoints, the best there is
    share: float  # of the time, spent on steps that are kept


def goodput(
    gpus: int, mtbf_gpu_hours: float = 50_700.0, checkpoint_s: float = 60.0, restart_s: float = 600.0
) -> Goodput:
    """The share of the time in which a synchronous run gets on, if it saves as often as pays (Young and Daly).

        ├── interval ──┤ckpt├── interval ──┤ckpt├── half ──✗── restart ──┤
                                                └── lost, as is restart ──┘

    A checkpoint of c seconds pays every √(2·c·MTBF); a failure costs the restart and half an interval on average. Where
    restarts and lost work take longer than the time between failures, nothing gets on: the share is 0.

    Args:
        gpus: How many there are; any that fails stops all.
        mtbf_gpu_hours: Hours of one GPU per failure of the run. The default is that of Llama 3's training: 419
            unexpected interruptions of 16,384 GPUs in 54 days.
        checkpoint_s: How long a checkpoint stops the run.
        restart_s: From a failure to the next step: noticing, restarting, loading.

    >>> run = goodput(16_384)
    >>> round(run.mtbf_s / 3600, 2), round(run.interval_s / 60), round(run.share, 2)
    (3.09, 19, 0.85)
    """
    if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1:
        raise ValueError(f"goodput: gpus must be a whole number of at least 1, got {gpus!r}")
    if not 0 < mtbf_gpu_hours < math.inf:
        raise ValueError(f"goodput: mtbf_gpu_hours must be a positive number of hours, got {mtbf_gpu_hours!r}")
    for name, value in (("checkpoint_s", checkpoint_s), ("restart_s", restart_s)):
        if not 0 <= value < math.inf:
            raise ValueError(f"goodput: {name} must be a number of seconds, 0 or more, got {value!r}")
    mtbf_s = mtbf_gpu_hours * 3600 / gpus
    # The root is for checkpoints much shorter than the time between failures; past that, once per failure is enough.
    interval_s = min(math.sqrt(2 * checkpoint_s * mtbf_s), mtbf_s)
    working = interval_s / (interval_s + checkpoint_s) if checkpoint_s > 0 else 1.0
    lost_s = restart_s + interval_s / 2
    return Goodput(mtbf_s, interval_s, working * max(0.0, 1 - lost_s / mtbf_s))
