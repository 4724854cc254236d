"""Digests that a GPU still computes when their turn comes: every rank says the same one again, at the same place."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from delayed_runs import backward, make_model

import gradsync as gs
from gradsync.drift.digests import DigestReading, ReplicaDigests
from gradsync.trace.lines import Health

LATE = range(4, 30, 5)  # readings of these steps are not there when their turn comes


def late_on_rank_1(look: Callable[[gs.GradSync], object], k: int) -> list[str]:
    """What a run told of drift; rank 0 looks at its handle after every step, which needs no other rank."""
    read = ReplicaDigests._read

    def read_late(digests: ReplicaDigests, step: int, pieces: Any) -> DigestReading:
        reading = read(digests, step, pieces)
        if dist.get_rank() == 1 and step in LATE:
            reading.events = [torch.cuda.Event]  # type: ignore[list-item]  # as of a GPU that is two steps behind
        return reading

    def is_there_next_time(reading: DigestReading) -> bool:
        there = not reading.events
        reading.events.clear()
        return there

    model, optimizer = make_model()
    lines: list[Health] = []
    with (
        patch.object(ReplicaDigests, "_read", read_late),
        patch.object(DigestReading, "is_there", is_there_next_time),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        sync = gs.attach(model, optimizer, gs.Plan(pace=gs.delayed(k)), guard=gs.Guard(drift="raise"))
        sync._synchronization.health_log.listen(lines.append)
        for step in range(40):
            backward(model, step)
            if dist.get_rank() == 0:
                look(sync)
            optimizer.step()
            optimizer.zero_grad()
        while sync.drain():
            optimizer.step()
            optimizer.zero_grad()
        sync.detach()
    return [line.text for line in lines]


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("look", [gs.GradSync.state_dict, gs.GradSync.residuals])
def test_a_rank_that_looks_at_its_state_alone_says_the_same_digests(look: Any, k: int, run: Callable[..., Any]) -> None:
    assert run(late_on_rank_1, look, k, ranks=2) == [[], []]
