"""Real processes, on this host and on two hosts: groups form, or fail with a sentence on every rank."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from launchers import without_launcher

SCRIPT = """
import os, sys, torch, torch.distributed as dist
from gradsync.launch.init import init
try:
    init(timeout=float(sys.argv[1]))
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    sys.exit(3)
for _ in range(2):
    tensor = torch.full((5,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    # In one write, since the ranks share torchrun's output.
    os.write(1, f"rank {dist.get_rank()} of {dist.get_world_size()} has {tensor[0]:g}\\n".encode())
    dist.destroy_process_group()
    init(timeout=float(sys.argv[1]))
dist.barrier()  # nobody may close its connections before everybody has them
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def run_ranks(commands: list[list[str]], envs: list[dict[str, str]]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each process; none survives."""
    with ExitStack() as stack:
        processes = []
        for command, env in zip(commands, envs, strict=True):
            env = without_launcher(os.environ) | {"OMP_NUM_THREADS": "1"} | env
            process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        outputs = [process.communicate(timeout=60) for process in processes]
        return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def test_torchrun_forms_a_group(script: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    [(code, out, err)] = run_ranks([[*torchrun, script, "30"]], [{}])
    assert code == 0, err
    assert sorted(out.split("\n")) == [""] + ["rank 0 of 2 has 3"] * 2 + ["rank 1 of 2 has 3"] * 2
    assert err.count("ranks 0-1 of 2, gloo on lo (127.0.0.1), backend") == 3  # one per init


def test_mpi_on_one_host_needs_no_address(script: str, tmp_path: Path) -> None:
    job = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": str(tmp_path)}
    envs = [job | {"OMPI_COMM_WORLD_RANK": r, "OMPI_COMM_WORLD_LOCAL_RANK": r} for r in "01"]
    outcomes = run_ranks([[sys.executable, script, "30"]] * 2, envs)
    for rank, (code, out, err) in enumerate(outcomes):
        assert code == 0, err
        assert out == f"rank {rank} of 2 has 3\n" * 2
    assert "gloo on lo (127.0.0.1)" in outcomes[0][2]
    assert "gloo on" not in outcomes[1][2]  # once per host; c10d may tell there that it tried twice to connect


# Two hosts: two network namespaces of this kernel, joined by a cable of their own


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The names of two namespaces, 10.201.0.1 and 10.201.0.2; `head` is the first, as Debian would say it."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("Two hosts are made of network namespaces, which needs root and the ip command.")
    names = [f"gradsync-{os.getpid()}-{side}" for side in "ab"]
    with ExitStack() as stack:
        for number, name in enumerate(names):
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"Two hosts are made of network namespaces, which this machine refuses: {error.stderr}")
            stack.callback(ip, "netns", "delete", name)
            folder = Path("/etc/netns") / name
            folder.mkdir(parents=True)
            stack.callback(shutil.rmtree, folder)
            own = ["127.0.1.1", "10.201.0.1"][number]
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n{own} head\n")
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.201.0.{number + 1}/24", "dev", "cable")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "cable", "up")
        yield names


def run_on(hosts: list[str], script: str, env: dict[str, str], timeout: str = "30") -> list[tuple[int, str, str]]:
    commands = [["ip", "netns", "exec", host, sys.executable, script, timeout] for host in hosts]
    envs = [{"WORLD_SIZE": "2", "MASTER_PORT": "29500", "RANK": str(r)} | env for r in range(2)]
    return run_ranks(commands, envs)


@pytest.mark.parametrize("master", ["10.201.0.1", "head"])
def test_ranks_on_two_hosts_use_the_cable(hosts: list[str], script: str, master: str) -> None:
    outcomes = run_on(hosts, script, {"MASTER_ADDR": master})
    for rank, (code, out, err) in enumerate(outcomes):
        assert code == 0, out + err
        assert out == f"rank {rank} of 2 has 3\n" * 2
        assert f"rank {rank} of 2, gloo on cable (10.201.0.{rank + 1}), backend" in err


def test_loopback_across_hosts_is_refused_on_every_rank(hosts: list[str], script: str) -> None:
    outcomes = run_on(hosts, script, {"MASTER_ADDR": "10.201.0.1", "GLOO_SOCKET_IFNAME": "lo"})
    for rank, (code, out, err) in enumerate(outcomes):
        assert code == 3, out + err
        assert out.startswith(f"LaunchError: [rank {rank}/2] rank 0 on host ")
        assert "would use gloo on lo (127.0.0.1), which is loopback and out of reach for rank 1" in out
        assert "set GLOO_SOCKET_IFNAME" in out
