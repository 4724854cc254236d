"""Who takes part in a round, and the channels that it costs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import gradsync as gs
from gradsync.transport.groups import BRIDGE, HOUSE
from gradsync.transport.host_meeting import declare_host


def channels(across: bool, hosts: str) -> list[str]:
    """Of those that only across_hosts uses, what a few steps have made on this rank."""
    declare_host(hosts[dist.get_rank()])
    try:
        model = torch.nn.Linear(64, 64)
        compress = gs.across_hosts(gs.int8()) if across else gs.int8()
        sync = gs.attach(model, torch.optim.SGD(model.parameters(), 0.1), gs.Plan(compress=compress))
        for _ in range(3):
            model(torch.randn(4, 64)).sum().backward()
        made = [name for name in (BRIDGE, HOUSE) if name in sync._lane.groups.data]
        sync.detach()
        return made
    finally:
        declare_host(None)


def test_channels_across_hosts_are_made_only_for_what_travels_across_hosts_only(run: Any) -> None:
    assert run(channels, False, "ab") == [[], []]
    assert run(channels, True, "ab") == [[BRIDGE], [BRIDGE]]
