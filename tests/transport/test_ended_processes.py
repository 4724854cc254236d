"""What the kernel says of a rank's process, and what is remembered of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from gradsync.transport.host_processes import ended, is_gone, look_at, remember


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits, with a name that is no help to whoever reads /proc."""
    with subprocess.Popen(["/bin/sh", "-c", "read _"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def wait_until_stopped(pid: int, options: int) -> None:
    os.waitid(os.P_PID, pid, options | os.WNOWAIT)


def test_a_stopped_process_is_told_from_one_that_runs(child: subprocess.Popen[bytes]) -> None:
    first = look_at(child.pid)
    assert first is not None
    assert not first.stopped
    assert not first.ended
    child.send_signal(signal.SIGSTOP)
    wait_until_stopped(child.pid, os.WSTOPPED)
    second = look_at(child.pid)
    assert second is not None
    assert second.stopped
    assert second.begun == first.begun


def test_a_process_that_nobody_has_reaped_yet_is_gone(child: subprocess.Popen[bytes]) -> None:
    assert not is_gone(child.pid)
    child.kill()
    wait_until_stopped(child.pid, os.WEXITED)
    process = look_at(child.pid)
    assert process is not None
    assert process.ended
    assert is_gone(child.pid)
    child.wait()
    assert is_gone(child.pid)


def test_any_name_can_be_read(tmp_path: object) -> None:
    name = f"{tmp_path}/a) R 1 (b"
    os.symlink(sys.executable, name)
    code = "import sys; sys.stdin.read()"
    with subprocess.Popen([name, "-c", code], stdin=subprocess.PIPE) as process:
        found = look_at(process.pid)
        assert found is not None
        assert not found.ended
        process.kill()


def test_a_rank_is_remembered_as_long_as_the_default_group_lives(child: subprocess.Popen[bytes]) -> None:
    assert not ended(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        remember(1, child.pid)
        assert not ended(1)
        child.kill()
        child.wait()
        assert ended(1)
        assert not ended(2)
    finally:
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        assert not ended(1)
    finally:
        dist.destroy_process_group()
