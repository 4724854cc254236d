"""`init` in one process: alone, beside a group that exists, and with arguments that cannot be."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launchers import STEP, TORCHRUN
from torch._C._distributed_c10d import HashStore

from gradsync.errors import LaunchError
from gradsync.launch.init import init
from gradsync.transport.host_meeting import host_identity


def test_without_launcher_one_rank_works_silently(capfd: pytest.CaptureFixture[str]) -> None:
    init()
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [1, 1]
    init()
    assert capfd.readouterr() == ("", "")


def test_one_rank_listens_nowhere_but_on_loopback() -> None:
    if shutil.which("ss") is None:
        pytest.skip("The listening sockets of this process are read with ss of iproute2, which is not installed.")
    init()
    listening = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, timeout=20, check=True).stdout
    ours = [line.split()[3] for line in listening.splitlines() if f"pid={os.getpid()}," in line]
    assert all(address.startswith("127.") for address in ours)


def test_existing_group_is_adopted() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    init()
    init(backend="gloo")
    assert dist.group.WORLD is group


def test_group_smaller_than_announced_is_an_error() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    os.environ.update(STEP)
    with pytest.raises(LaunchError, match=r"^\[rank 3/4\] SLURM announced 4 tasks, but the process group .* has 1"):
        init()


def test_another_backend_than_the_existing_groups_is_a_mistake() -> None:
    dist.init_process_group("cpu:gloo", store=HashStore(), rank=0, world_size=1)
    init(backend="cpu:gloo")
    with pytest.raises(ValueError, match="the process group that exists has 'cpu:gloo'"):
        init(backend="cuda:gloo")


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"backend": "glue"}, ValueError, "backend must be one of .*gloo.*got 'glue'"),
        ({"backend": "cpu:gloo,glue"}, ValueError, "must name a device for each"),
        ({"backend": 3}, TypeError, "backend must be a name"),
        ({"timeout": 0}, ValueError, "positive number of seconds, got 0"),
        ({"timeout": float("nan")}, ValueError, "positive number of seconds"),
        ({"timeout": timedelta(seconds=-1)}, ValueError, "positive number of seconds"),
        ({"timeout": "10"}, TypeError, "seconds or a timedelta, got '10'"),
        ({"timeout": True}, TypeError, "seconds or a timedelta"),
        ({"host": ""}, ValueError, "host must be a name"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        init(**arguments)
    assert not dist.is_initialized()


def test_our_own_backend_has_to_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "gradsync.launch.choose_backend.available_backends", lambda: ["gloo"]
    )  # another test may have done so
    with pytest.raises(ValueError, match=r"'cpu:gradsync' is not registered .* import gradsync\.backend first"):
        init(backend="cpu:gradsync")


def test_host_is_declared() -> None:
    init(host="rack-3")
    assert host_identity() == "declared:rack-3"


def test_taken_port_is_a_sentence() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        taken = other.getsockname()[1]
        os.environ.update(TORCHRUN | {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken)})
        with pytest.raises(LaunchError, match=rf"^\[rank 0/4\] port {taken} of this host is taken: set MASTER_PORT"):
            init(timeout=5)


def test_unreachable_rank_0_is_a_sentence(port: int) -> None:
    os.environ.update(TORCHRUN | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    with pytest.raises(LaunchError, match=rf"^\[rank 1/4\] rank 0 could not be reached at 127\.0\.0\.1:{port} within"):
        init(timeout=0.3)
