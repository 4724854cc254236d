"""Errors keep what they say wherever they are carried."""

from __future__ import annotations

import copy

import pytest

from gradsync.errors import PeerFault, PeerLost, SyncTimeout


@pytest.mark.parametrize("kind", [PeerFault, PeerLost, SyncTimeout])
def test_error_keeps_its_ranks_between_processes(kind: type[PeerFault]) -> None:
    """A copy goes by the same protocol as a pickle: a framework that could not rebuild the error would hide it."""
    error = kind("[rank 0/4 step 3] ranks 1 and 2 died", [1, 2])
    same = copy.copy(error)
    assert type(same) is kind
    assert (str(same), same.ranks) == (str(error), (1, 2))
