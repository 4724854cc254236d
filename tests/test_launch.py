"""Launching: what an environment means, and that groups form, or fail with a sentence, on every rank."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore, TCPStore

from gradsync.errors import LaunchError
from gradsync.launch import init
from gradsync.launch.backend import default_backend
from gradsync.launch.environment import Task, read_task
from gradsync.launch.interface import (
    endpoint_towards,
    interface_addresses,
    loopback_endpoint,
    named_endpoint,
)
from gradsync.launch.nodelist import expand_hosts
from gradsync.launch.rendezvous import Rendezvous
from gradsync.launch.roster import Peer, Seat, announcement, refusal
from gradsync.transport.hosts import declare_host, host_identity

LAUNCHER_PREFIXES = ("SLURM_", "OMPI_", "PMI", "MPI_", "TORCHELASTIC_", "MASTER_", "GLOO_")
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
STEP = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "node[01-09]",
    "SLURM_STEP_NODELIST": "node[07-08]",
}
BATCH = {"SLURM_JOB_ID": "71", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "node[01-02]"}
BATCH_OF_NODES = {
    "SLURM_JOB_ID": "71",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-17@1",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def without_launcher(env: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in env.items() if k not in LAUNCHER_NAMES and not k.startswith(LAUNCHER_PREFIXES)}


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


# --- what an environment means ---


@pytest.mark.parametrize(
    ("env", "launcher", "rank", "world_size", "local_rank", "address"),
    [
        (TORCHRUN, "torchrun", 1, 4, 1, "n0"),
        ({k: v for k, v in TORCHRUN.items() if k != "LOCAL_RANK"}, "torchrun", 1, 4, None, "n0"),
        (STEP, "SLURM", 3, 4, 1, "node07"),
        (STEP | {"SLURM_STEP_NODELIST": "node07"}, "SLURM", 3, 4, 1, "127.0.0.1"),
        (STEP | {"MASTER_ADDR": "head"}, "SLURM", 3, 4, 1, "head"),
        (STEP | {"WORLD_SIZE": "4"}, "SLURM", 3, 4, 1, "node07"),
        # Where srun was typed: at times a login node, and never a promise about rank 0.
        (
            STEP | {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9", "SLURM_SRUN_COMM_HOST": "10.0.0.9"},
            "SLURM",
            3,
            4,
            1,
            "node07",
        ),
        # srun's --ntasks-per-node and the job's are no business of a step's task.
        (STEP | {"SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_NUM_NODES": "9"}, "SLURM", 3, 4, 1, "node07"),
        # One step of two components on hosts of two kinds: the job's numbers are those of one component.
        (STEP | {"SLURM_HET_SIZE": "2", "SLURM_STEP_NODELIST": "gpu-a[3,7],cpu01"}, "SLURM", 3, 4, 1, "gpu-a3"),
        # srun --mpi=pmix.
        (STEP | {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.71.0"}, "SLURM", 3, 4, 1, "node07"),
        (OPEN_MPI, "Open MPI", 1, 2, 1, "127.0.0.1"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "n0"}, "Open MPI", 1, 2, 1, "n0"),
        (PMI, "PMI", 1, 2, 1, "127.0.0.1"),
        # The innermost launcher wins.
        (STEP | TORCHRUN, "torchrun", 1, 4, 1, "n0"),
        (OPEN_MPI | TORCHRUN, "torchrun", 1, 4, 1, "n0"),
        (STEP | OPEN_MPI, "Open MPI", 1, 2, 1, "127.0.0.1"),
        (BATCH | OPEN_MPI, "Open MPI", 1, 2, 1, "127.0.0.1"),
        (STEP | PMI, "PMI", 1, 2, 1, "127.0.0.1"),
        # srun --mpi=pmi2 sets both, for the same tasks.
        (STEP | {"PMI_RANK": "3", "PMI_SIZE": "4"}, "SLURM", 3, 4, 1, "node07"),
    ],
)
def test_environment_names_the_task(
    env: dict[str, str], launcher: str, rank: int, world_size: int, local_rank: int | None, address: str
) -> None:
    task = read_task(env, parent=1)
    assert task is not None
    assert (task.launcher, task.rank, task.world_size) == (launcher, rank, world_size)
    assert (task.local_rank, task.address) == (local_rank, address)
    assert not task.agent_store


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        # `srun --pty bash`, and the shell of an salloc that makes it an interactive step of its own.
        STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"},
        BATCH | {"SLURM_NTASKS": "1"},
        BATCH_OF_NODES | {"SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_NUM_NODES": "1"},
        # No tasks were asked for: this is a count of cores.
        {"SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "48"},
        {k: v for k, v in BATCH.items() if k != "SLURM_PROCID"},
    ],
)
def test_one_task_is_alone(env: dict[str, str]) -> None:
    assert read_task(env, parent=1) is None


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"RANK": "0"}, "RANK=0 is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set but RANK is not"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "WORLD_SIZE=2 is set but RANK is not"),
        (TORCHRUN | {"RANK": "one"}, "RANK must be a whole number, got 'one'"),
        (TORCHRUN | {"RANK": "-1"}, "RANK must be a whole number, got '-1'"),
        (TORCHRUN | {"LOCAL_RANK": ""}, "LOCAL_RANK must be a whole number, got ''"),
        (TORCHRUN | {"RANK": "4"}, "rank 4 of 4, but ranks go from 0 to 3"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT must be from 1 to 65535, got 0"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT must be from 1 to 65535, got 70000"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR is not"),
        ({k: v for k, v in STEP.items() if k != "SLURM_PROCID"}, "SLURM_PROCID must be a whole number"),
        (STEP | {"SLURM_STEP_NODELIST": "node[7"}, "SLURM_STEP_NODELIST cannot be read"),
        (STEP | {"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}, "SLURM_STEP_NODELIST is not set"),
        (BATCH, r"announced 8 tasks \(SLURM_NTASKS\).* start with `srun python"),
        (BATCH_OF_NODES, r"announced 8 tasks \(SLURM_JOB_NUM_NODES times SLURM_NTASKS_PER_NODE\)"),
        ({"SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2"}, r"announced 2 tasks \(SLURM_JOB_NUM_NODES\)"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "1 of them on this host.*mpirun -x MASTER_ADDR"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "unknown number of them.*mpiexec -genv MASTER_ADDR"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "n0"}, "MASTER_PORT is not set"),
    ],
)
def test_damaged_environment_is_a_sentence(env: dict[str, str], sentence: str) -> None:
    with pytest.raises(LaunchError, match=sentence):
        read_task(env, parent=1)


def port_of(env: dict[str, str], parent: int = 1) -> int:
    task = read_task(env, parent)
    assert task is not None
    return task.port


def test_port_is_the_jobs_own_and_below_the_ephemeral_range() -> None:
    steps = [port_of(STEP | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(s)}) for job in range(50) for s in (0, 1)]
    assert all(20000 <= port < 32000 for port in steps)
    assert len(set(steps)) > 95
    assert port_of(STEP | {"SLURM_PROCID": "0"}) == port_of(STEP)
    assert port_of(OPEN_MPI, parent=1) == port_of(OPEN_MPI, parent=2)
    assert port_of(OPEN_MPI) != port_of(OPEN_MPI | {"PMIX_NAMESPACE": "prterun-vm-18@1"})
    assert port_of(PMI, parent=1) != port_of(PMI, parent=2)
    assert port_of(PMI | {"MASTER_PORT": "29500"}) == 29500


def test_ranks_under_wrapper_scripts_meet_when_the_port_is_given() -> None:
    env = PMI | {"MASTER_PORT": "29500"}
    assert read_task(env, parent=1) == read_task(env, parent=2)


# --- SLURM's node lists ---


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login1", ["login1"]),
        ("a,b", ["a", "b"]),
        ("node[01-03,07]-ib,login1", ["node01-ib", "node02-ib", "node03-ib", "node07-ib", "login1"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[0-1]n[1-2]", ["r0n1", "r0n2", "r1n1", "r1n2"]),
        ("gpu-a[3].cluster", ["gpu-a3.cluster"]),
    ],
)
def test_node_list_is_written_out(text: str, hosts: list[str]) -> None:
    assert list(expand_hosts(text)) == hosts


@pytest.mark.parametrize(
    "text", ["", "a,", ",a", "a,,b", "n[1", "n1]", "n[]", "n[1-]", "n[3-1]", "n[a-b]", "a b", "n[[1]]"]
)
def test_damaged_node_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"node list|set of numbers|backwards"):
        list(expand_hosts(text))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.from_regex(r"[a-z][a-z-]{0,4}", fullmatch=True),
            st.lists(st.tuples(st.integers(0, 120), st.integers(0, 4)), min_size=1, max_size=3),
            st.integers(1, 4),
            st.sampled_from(["", "-ib", ".x"]),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_node_list_round_trips(groups: list[tuple[str, list[tuple[int, int]], int, str]]) -> None:
    texts, hosts = [], []
    for head, spans, width, tail in groups:
        texts.append(f"{head}[{','.join(f'{a:0{width}}-{a + n:0{width}}' for a, n in spans)}]{tail}")
        for first, more in spans:
            digits = len(f"{first:0{width}}")
            hosts += [f"{head}{number:0{digits}}{tail}" for number in range(first, first + more + 1)]
    assert list(expand_hosts(",".join(texts))) == hosts


# --- interfaces ---


def test_every_interface_with_an_ipv4_address_is_known() -> None:
    known = interface_addresses()
    assert {name for name, _ in known} <= {name for _, name in socket.if_nameindex()}
    assert ("lo", "127.0.0.1") in known


def test_endpoint_is_the_interface_that_routes_there() -> None:
    for remote in ("127.0.0.1", "127.0.1.1", "localhost"):
        endpoint = endpoint_towards(remote)
        assert (endpoint.interface, endpoint.loopback) == ("lo", True)
    for name, address in interface_addresses():
        if ":" not in address and name != "lo":
            # Packets to oneself go through loopback, but from the interface's own address.
            assert (endpoint_towards(address).interface, endpoint_towards(address).address) == (name, address)


def test_named_interface_must_exist_and_loopback_in_a_list_counts() -> None:
    assert named_endpoint("lo") == loopback_endpoint()
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME=lo,eth77 names 'eth77'.*lo \(127\.0\.0\.1\)"):
        named_endpoint("lo,eth77")


# --- what follows from the roster ---


def peer(network: str, host: str = "k", backend: str | None = None) -> Peer:
    return Peer(hostname="vm", host=host, network=network, towards_master=None, backend=backend)


def seat(address: str, gpu: str | None = None, problem: str | None = None) -> Seat:
    return Seat("lo" if address.startswith("127.") else "eth0", address, gpu, problem)


def test_loopback_is_refused_across_networks_only() -> None:
    seats = [seat("10.0.0.1"), seat("127.0.0.1")]
    assert refusal([peer("a"), peer("a")], seats) is None
    sentence = refusal([peer("a"), peer("b")], seats)
    assert sentence is not None
    assert sentence.startswith("rank 1 on host vm would use gloo on lo (127.0.0.1), which is loopback")
    assert "GLOO_SOCKET_IFNAME" in sentence


def test_declared_hosts_on_one_network_may_use_loopback() -> None:
    peers = [peer("a", host="declared:x"), peer("a", host="declared:y")]
    seats = [seat("127.0.0.1"), seat("127.0.0.1")]
    assert refusal(peers, seats) is None
    assert (
        announcement(0, peers, seats, "gloo") == "gradsync: host x: rank 0 of 2, gloo on lo (127.0.0.1), backend gloo"
    )
    assert (
        announcement(1, peers, seats, "gloo") == "gradsync: host y: rank 1 of 2, gloo on lo (127.0.0.1), backend gloo"
    )


def test_first_rank_of_each_host_speaks() -> None:
    peers = [peer(network) for network in "aabba"]
    seats = [seat(f"10.0.0.{rank}") for rank in range(5)]
    lines = [announcement(rank, peers, seats, "gloo") for rank in range(5)]
    assert [line is not None for line in lines] == [True, False, True, False, False]
    assert lines[0] == "gradsync: host vm: ranks 0-1,4 of 5, gloo on eth0 (10.0.0.0), backend gloo"


@pytest.mark.parametrize(
    ("peers", "seats", "sentence"),
    [
        ([peer("a"), peer("a", backend="gloo")], [seat("127.0.0.1")] * 2, "rank 0 with None, rank 1 with 'gloo'"),
        (
            [peer("a")] * 2,
            [seat("127.0.0.1"), seat("127.0.0.1", problem="no.")],
            "rank 1 on host vm cannot take part: no.",
        ),
        ([peer("a", backend="nccl")] * 2, [seat("127.0.0.1", gpu="g")] * 2, "ranks 0 and 1 share g"),
        (
            [peer("a", backend="nccl")] * 2,
            [seat("127.0.0.1", gpu="g"), seat("127.0.0.1")],
            "rank 1 on host vm has none",
        ),
    ],
)
def test_roster_is_refused_with_a_sentence(peers: list[Peer], seats: list[Seat], sentence: str) -> None:
    assert sentence in (refusal(peers, seats) or "")


def test_backend_follows_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert default_backend([None, None]) == ("gloo", None)
    assert default_backend(["a", "b"]) == ("cpu:gloo,cuda:nccl", None)
    assert default_backend(["a", None])[0] == "gloo"
    backend, note = default_backend(["a", "b", "a"])
    assert backend == "cpu:gloo,cuda:gloo"
    assert note is not None
    assert "ranks 0 and 2 share a GPU" in note


# --- one process ---


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
    monkeypatch.setattr("gradsync.launch.backend.available_backends", lambda: ["gloo"])  # another test may have done so
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


# --- the meeting, ranks as threads ---


def meeting(
    ranks: list[int], world_size: int, port: int, act: Callable[[Rendezvous, int], Any], timeout: float = 20
) -> list[Any]:
    """What `act` returned or raised on each rank. All stay until the last is done, as rank 0 has the store."""
    outcomes: dict[int, Any] = {}
    present = []

    def run(rank: int) -> None:
        task = Task("torchrun", rank, world_size, None, "127.0.0.1", port, "test")
        try:
            rendezvous = Rendezvous(task, timedelta(seconds=timeout))
            present.append(rendezvous)
            outcomes[rank] = act(rendezvous, rank)
        except LaunchError as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [outcomes[rank] for rank in ranks]


def test_exchange_gives_every_rank_every_record(port: int) -> None:
    records = meeting([0, 1, 2], 3, port, lambda rendezvous, rank: rendezvous.exchange("x", {"me": rank}))
    assert records == [[{"me": 0}, {"me": 1}, {"me": 2}]] * 3


def test_missing_ranks_are_named_on_every_rank(port: int) -> None:
    errors = meeting([0, 2], 4, port, lambda rendezvous, rank: None, timeout=1)
    for rank, error in zip([0, 2], errors, strict=True):
        assert isinstance(error, LaunchError)
        assert str(error).startswith(f"[rank {rank}/4] torchrun announced 4 tasks, but ranks 1 and 3 did not come to")


def test_keys_of_an_earlier_life_are_not_read(port: int) -> None:
    """Torchrun's agent keeps its store over restarts, with all that dead ranks wrote."""
    limit = timedelta(seconds=20)
    keeper = TCPStore("127.0.0.1", port, is_master=True, timeout=limit, wait_for_workers=False)

    def live(rank: int, life: int, timeout: timedelta = limit) -> list[Any]:
        task = Task("torchrun", rank, 2, None, "127.0.0.1", port, "test", agent_store=True)
        return Rendezvous(task, timeout).exchange("x", {"life": life})

    with pytest.raises(LaunchError, match="rank 1 did not come"):
        live(0, 0, timedelta(seconds=0.1))
    for life in (1, 2):
        answer = f"gradsync/test/{keeper.get('gradsync/test/challenge').decode()}/meet/1"
        keeper.delete_key(answer)
        with ThreadPoolExecutor(1) as other:
            early = other.submit(live, 1, life)
            keeper.wait([answer])  # rank 1 is there, and found the challenge of a dead rank 0
            assert live(0, life) == [{"life": life}] * 2
            assert early.result(timeout=30) == [{"life": life}] * 2


# --- real processes ---

SCRIPT = """
import os, sys, torch, torch.distributed as dist
from gradsync.launch import init
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


# --- two hosts: two network namespaces of this kernel, joined by a cable of their own ---


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
