"""What listeners hear of a step that this rank did not compute."""

from __future__ import annotations

import torch
import torch.distributed as dist

import gradsync as gs
from gradsync.launch.spawn import RankPool


def leave_one_out(left_out: int) -> list[bool]:
    """In one step rank 1's loss touches no parameter: what its listener hears of each synchronization."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync, heard = gs.attach(model, optimizer), list[bool]()
    sync._steps.tell(synchronized=heard.append)
    for step in range(4):
        optimizer.zero_grad()
        if step != left_out or dist.get_rank() != 1:
            model(torch.randn(3, 2)).sum().backward()
        optimizer.step()
    sync.detach()
    return heard


def test_a_step_counts_for_the_ranks_that_ran_a_backward(pool: RankPool) -> None:
    assert pool.run(leave_one_out, 2, ranks=2) == [[True] * 4, [True, True, False, True]]
