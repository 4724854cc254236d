"""A short run of two ranks that leaves what the commands of the pages read: traces, a profile, a cluster, a plan."""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO

import torch

import gradsync as gs
from gradsync.cluster import Device


def trained(folder: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    with redirect_stderr(StringIO()):
        # Links that are known need no probe, which would take seconds.
        wire, device = gs.Link(1e-5, 1e9), Device(flops=1e11)
        cluster = gs.Cluster(((0, 1),), inside=wire, across=wire, device=device)
        sync = gs.attach(model, optimizer, gs.auto(cluster=cluster, save=folder))
        for batch in sync.data([torch.randn(8, 64) for _ in range(40)]):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        sync.detach()
