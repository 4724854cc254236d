"""What the ranks of a lab do while its network stands still: they train, and tell the test when."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

import gradsync as gs
from gradsync.errors import PeerFault

STALLED_STEP = 2


def train_through(folder: str, guard: dict[str, float]) -> tuple[str, list[int], str]:
    """The error, whom it names and what it says; nothing where training came to its end.

    The last rank comes to the stalled step when the test has had its way with the network.
    """
    gs.init(timeout=60)
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    sync = gs.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), guard=gs.Guard(**guard))  # type: ignore[arg-type]
    try:
        for step in range(STALLED_STEP + 3):
            if (rank, step) == (last, STALLED_STEP):
                _meet(Path(folder))
            model(torch.randn(4, 64)).square().mean().backward()
            model.zero_grad()
    except PeerFault as error:
        return type(error).__name__, list(error.ranks), str(error)
    sync.detach()
    return "", [], ""


def _meet(folder: Path) -> None:
    (folder / "ready").touch()
    deadline = time.monotonic() + 30
    while not (folder / "stalled").exists():
        assert time.monotonic() < deadline, "the test did nothing to the network"
        time.sleep(0.01)
