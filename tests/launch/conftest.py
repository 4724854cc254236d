"""Whatever started pytest: here no launcher is at work, and no group is left."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from launchers import without_launcher

from gradsync.transport.host_meeting import declare_host


@pytest.fixture(autouse=True)
def _no_launcher() -> Iterator[None]:
    """Whatever started pytest, the tests start from no launcher, and leave no group behind."""
    before = dict(os.environ)
    clean = without_launcher(before)
    for name in before.keys() - clean.keys():
        del os.environ[name]
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    declare_host(None)
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def port() -> Iterator[int]:
    """A port that nobody else is given: bound, but not listening, so that a rank may still listen on it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
