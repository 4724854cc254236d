"""Who would go on, as a rank that ends sees the others."""

from __future__ import annotations

import pytest

from gradsync.engine.exit_notice import going_on
from gradsync.transport.blame import PeerView
from gradsync.transport.heartbeat import Phase, RankState

STEP = 7


def view(step: int, phase: Phase, gone: bool = False) -> PeerView:
    return PeerView(RankState(0, step, phase, -1, ()), dead=gone, silent=False)


@pytest.mark.parametrize("phase", [Phase.BACKWARD, Phase.SYNCHRONIZING, Phase.WAITING])
def test_a_rank_inside_a_step_that_this_one_does_not_come_to_would_go_on(phase: Phase) -> None:
    views = {0: view(STEP, phase), 2: view(STEP + 1, phase)}
    assert going_on(views, STEP) == [0, 2]


@pytest.mark.parametrize(
    "other",
    [
        view(STEP - 1, Phase.WAITING),
        view(STEP, Phase.COMPUTING),
        view(STEP, Phase.LEFT),
        view(STEP, Phase.WAITING, gone=True),
    ],
    ids=["a step before", "computing", "left", "dead"],
)
def test_any_other_would_not(other: PeerView) -> None:
    assert going_on({0: other}, STEP) == []
