"""Each check of `gradsync doctor`: what it finds in facts that are odd, and nothing in facts that are not. Pure."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from gradsync.cli.doctor.all_checks import examine
from gradsync.cli.doctor.finding import Finding, Grade
from gradsync.cli.doctor.measured_links import HostClockOffset, MeasuredLink, MeasuredLinks
from gradsync.cli.doctor.rank_facts import Facts, Gpu, Nic
from gradsync.cli.doctor.text import conclusion

LO = Nic("lo", "127.0.0.1", 8, 65536, up=True, virtual=True)


def eth0(host: int, **changes: Any) -> Nic:
    return dataclasses.replace(Nic("eth0", f"10.0.0.{host + 1}", 24, 9000, 10000, 0, True), **changes)


def rank_of(host: int, rank: int, **changes: Any) -> Facts:
    """A rank of a sound cluster of two hosts with two ranks each."""
    sound = Facts(
        rank=rank, world_size=4, host="ab"[host], network=str(host), launcher="torchrun", num_nodes=2, master="a",
        python="3.11.7", torch="2.13.0", gradsync="0.1.0", backends=["gloo"], library=True, level="avx2",
        compiler="/usr/bin/cc", variables={"OMP_NUM_THREADS": "4"}, nics=[eth0(host), LO],
        name_address=f"10.0.0.{host + 1}", towards_master="eth0", shm_nbytes=8 << 30, shm_free_nbytes=8 << 30,
        num_files=65536, num_cpus=8, usable_cpus=8.0, num_threads=4,
    )  # fmt: skip
    return dataclasses.replace(sound, **changes)


def cluster(on: list[int] | None = None, **changes: Any) -> list[Facts]:
    """Sound, but for these changes on these ranks."""
    ranks = [rank_of(rank // 2, rank) for rank in range(4)]
    return [dataclasses.replace(each, **changes) if on is None or each.rank in on else each for each in ranks]


def variables(**values: str) -> dict[str, Any]:
    return {"variables": {"OMP_NUM_THREADS": "4", **values}}


def odd(facts: list[Facts], measured: MeasuredLinks | None = None) -> list[Finding]:
    found = [finding for finding in examine(facts, measured) if finding.grade != Grade.OK]
    assert all(finding.fix and finding.detail for finding in found)
    return found


GPUS = [Gpu("H200", f"uuid-{index}", 141 << 30, [1 - index]) for index in range(2)]
DOCKER = Nic("docker0", "172.17.0.1", 16, 1500, up=True, virtual=True)
TUNNEL = Nic("tun0", "10.8.0.2", 24, 1500, up=True, virtual=True)
IB = ["mlx5_0:1"]
TOPOLOGY = "\tGPU0\tGPU1\tNIC0\nGPU0\t X \tSYS\tSYS\nGPU1\tSYS\t X \tPIX\n"


def test_nothing_is_wrong_with_a_sound_cluster() -> None:
    assert odd(cluster()) == []
    assert conclusion(examine(cluster(), None)) == "Nothing is wrong here."


@pytest.mark.parametrize(
    ("facts", "grade", "what", "fix"),
    [
        (
            cluster([2, 3], torch="2.12.0"),
            "WRONG",
            "different versions of torch",
            "pip install torch==2.12.0    # on ranks 0-1",
        ),
        (
            cluster([3], torch="2.12.0"),
            "WRONG",
            "different versions of torch",
            "pip install torch==2.13.0    # on rank 3 (host b)",
        ),
        (cluster([1], python="3.12.1"), "WRONG", "different versions of python", "python3.11 -m venv"),
        (cluster([1], gradsync="0.0.9"), "WRONG", "different versions of gradsync", "pip install gradsync==0.1.0"),
        (cluster([0], nccl="2.27.3"), "WRONG", "different versions of nccl", "torch"),
        (
            cluster(torch="2.4.1"),
            "WRONG",
            "torch 2.4.1 on ranks 0-1 (host a) and ranks 2-3 (host b)",
            "pip install 'torch>=2.11,<3.0'",
        ),
        (cluster(backends=["mpi"]), "WRONG", "torch has no gloo", "pip install"),
        (cluster(gpus=GPUS), "WRONG", "torch has no NCCL", "pip install"),
        (
            cluster([2], library=False),
            "WRONG",
            "the C module is missing on rank 2 (host b)",
            "pip install --force-reinstall",
        ),
        (cluster(library=False, compiler=""), "NOTE", "the C module was not built", "sudo apt-get install -y gcc &&"),
        (
            cluster([2, 3], name_address="127.0.1.1", towards_master=""),
            "WRONG",
            "gloo listens on loopback on ranks 2-3 (host b)",
            "export GLOO_SOCKET_IFNAME=eth0",
        ),
        (
            cluster([2, 3], name_address="127.0.1.1"),  # and yet gradsync.init() listens on eth0
            "NOTE",
            "the host's name leads to loopback on ranks 2-3 (host b)",
            "export GLOO_SOCKET_IFNAME=eth0",
        ),
        (
            cluster(**variables(GLOO_SOCKET_IFNAME="lo")),
            "WRONG",
            "gloo listens on loopback",
            "export GLOO_SOCKET_IFNAME=eth0",
        ),
        (
            cluster([0, 1], **variables(GLOO_SOCKET_IFNAME="eth7")),
            "WRONG",
            "GLOO_SOCKET_IFNAME=eth7 on ranks 0-1",
            "export GLOO_SOCKET_IFNAME=eth0",
        ),
        (
            cluster([0, 1], nics=[eth0(0), DOCKER, LO], **variables(GLOO_SOCKET_IFNAME="docker0")),
            "WRONG",
            "gloo listens on docker0",
            "eth0",
        ),
        (
            cluster([0, 1], nics=[eth0(0), TUNNEL, LO], name_address="10.8.0.2", towards_master=""),
            "WRONG",
            "gloo listens on tun0",
            "eth0",
        ),
        (
            cluster([0, 1], nics=[eth0(0), TUNNEL, LO], name_address="10.8.0.2"),
            "NOTE",
            "the host's name leads to tun0 on ranks 0-1 (host a)",
            "eth0",
        ),
        (
            cluster(**variables(NCCL_SOCKET_IFNAME="ib")),
            "WRONG",
            "NCCL_SOCKET_IFNAME=ib",
            "export NCCL_SOCKET_IFNAME=eth0",
        ),
        (
            cluster(**variables(NCCL_SOCKET_IFNAME="=lo")),
            "WRONG",
            "NCCL listens on lo",
            "export NCCL_SOCKET_IFNAME=eth0",
        ),
        (
            cluster(
                [0, 1],
                **variables(NCCL_SOCKET_IFNAME="eth1", GLOO_SOCKET_IFNAME="eth0"),
                nics=[eth0(0), eth0(8, name="eth1"), LO],
            ),
            "NOTE",
            "gloo and NCCL use different networks on ranks 0-1",
            "eth0",
        ),
        (
            cluster([2, 3], nics=[eth0(1, address="10.9.0.2"), LO], name_address="10.9.0.2"),
            "NOTE",
            "different subnets",
            "ip route get 10.9.0.2",
        ),
        (
            cluster([2, 3], nics=[eth0(1, mtu=1500), LO]),
            "WRONG",
            "MTUs differ",
            "sudo ip link set dev eth0 mtu 1500    # on ranks 0-1 (host a)",
        ),
        (
            cluster([0, 1], nics=[eth0(0, mtu=1500), LO])[:2],
            "NOTE",
            "small packets on eth0",
            "sudo ip link set dev eth0 mtu 9000",
        ),
        (cluster([2, 3], nics=[eth0(1, mbit=1000), LO]), "WRONG", "network cards of different speed", "sudo ethtool"),
        (cluster([2, 3], shm_nbytes=64 << 20), "WRONG", "/dev/shm is tiny on ranks 2-3 (host b)", "--shm-size=8g"),
        (cluster(shm_free_nbytes=1 << 20), "WRONG", "/dev/shm is full", "ls"),
        (cluster(shm_nbytes=512 << 20), "NOTE", "/dev/shm is small", "remount"),
        (cluster(memfd=False), "NOTE", "memory cannot be shared", "docker run"),
        (
            cluster(memlock_nbytes=64 << 10, infiniband=IB),
            "WRONG",
            "little memory may be locked",
            "ulimit -l unlimited",
        ),
        (cluster(num_files=256), "NOTE", "few files", "ulimit -n"),
        (cluster(num_threads=8), "WRONG", "too many threads on ranks 0-1 (host a)", "export OMP_NUM_THREADS=4"),
        (cluster(usable_cpus=4.0), "WRONG", "too many threads", "export OMP_NUM_THREADS=2"),
        (cluster(usable_cpus=1.0), "NOTE", "more ranks than cores", "torchrun --nproc-per-node=1"),
        (
            cluster(num_threads=1, variables={"OMP_NUM_THREADS": "1"}),
            "NOTE",
            "cores are idle",
            "export OMP_NUM_THREADS=4",
        ),
        (
            cluster([2, 3], gpus=GPUS, backends=["gloo", "nccl"]),
            "WRONG",
            "different numbers of GPUs",
            "unset CUDA_VISIBLE_DEVICES",
        ),
        (
            cluster(gpus=GPUS, device=0, backends=["gloo", "nccl"]),
            "WRONG",
            "ranks 0 and 1 share a GPU",
            "torchrun --nproc-per-node=2",
        ),
        (
            cluster(gpus=GPUS, device=0, backends=["gloo", "nccl"], variables={"GRADSYNC_SHARE_GPUS": "1"}),
            "NOTE",
            "ranks 0 and 1 share a GPU",
            "unset GRADSYNC_SHARE_GPUS",
        ),
        (
            cluster(gpus=GPUS, topology=TOPOLOGY, backends=["gloo", "nccl"]),
            "NOTE",
            "GPUs of different processors",
            "nvidia-smi topo -m",
        ),
        (
            cluster(gpus=GPUS, topology=TOPOLOGY, backends=["gloo", "nccl"]),
            "NOTE",
            "GPUs far from the network",
            "NCCL_IB_HCA",
        ),
        (
            cluster(gpus=[Gpu("a"), Gpu("b")], backends=["gloo", "nccl"]),
            "NOTE",
            "GPUs do not reach each other",
            "nvidia-smi topo -p2p r",
        ),
        (
            cluster(gpus=[Gpu("a"), Gpu("b")], backends=["gloo", "nccl"]),
            "NOTE",
            "GPUs of different kinds",
            "nvidia-smi -L",
        ),
        (
            cluster(**variables(NCCL_IB_DISABLE="1"), infiniband=IB),
            "WRONG",
            "NCCL_IB_DISABLE=1",
            "unset NCCL_IB_DISABLE",
        ),
        (cluster(**variables(NCCL_P2P_DISABLE="1"), gpus=GPUS), "NOTE", "NCCL_P2P_DISABLE=1", "unset"),
        (cluster(**variables(NCCL_SHM_DISABLE="1"), gpus=GPUS), "NOTE", "NCCL_SHM_DISABLE=1", "unset"),
        (
            cluster([1], **variables(NCCL_DEBUG="info")),
            "NOTE",
            "NCCL_DEBUG=info on rank 1 (host a)",
            "export NCCL_DEBUG=WARN",
        ),
        (cluster(**variables(TORCH_DISTRIBUTED_DEBUG="DETAIL")), "WRONG", "TORCH_DISTRIBUTED_DEBUG=DETAIL", "export"),
        (
            cluster(**variables(TORCH_NCCL_BLOCKING_WAIT="1", TORCH_NCCL_ASYNC_ERROR_HANDLING="1")),
            "WRONG",
            "TORCH_NCCL_BLOCKING_WAIT=1",
            "unset",
        ),
        (cluster(**variables(CUDA_LAUNCH_BLOCKING="1"), gpus=GPUS), "WRONG", "CUDA_LAUNCH_BLOCKING=1", "unset"),
        (cluster(**variables(GRADSYNC_DISABLE="1")), "NOTE", "GRADSYNC_DISABLE=1", "unset"),
        (cluster(master="localhost"), "WRONG", "MASTER_ADDR=localhost", "export MASTER_ADDR="),
        (cluster(master="127.0.0.1")[:1], "WRONG", "MASTER_ADDR=127.0.0.1", "export MASTER_ADDR="),
        (
            cluster([3], trace="/nowhere/run", trace_problem="Permission denied"),
            "WRONG",
            "GRADSYNC_TRACE=/nowhere/run cannot be written on rank 3",
            "export",
        ),
        (
            cluster(trace="/full/run", trace_free_nbytes=1000),
            "NOTE",
            "little room for GRADSYNC_TRACE=/full/run",
            "df -h",
        ),
        (cluster([1], **variables(NCCL_ALGO="Ring")), "NOTE", "NCCL_ALGO differs between ranks", "unset NCCL_ALGO"),
    ],
)
def test_what_is_odd_is_found_with_its_fix(facts: list[Facts], grade: str, what: str, fix: str) -> None:
    found = [finding for finding in odd(facts) if what in finding.what]
    assert [finding.grade.name for finding in found[:1]] == [grade], [finding.what for finding in odd(facts)]
    assert fix in found[0].fix


@pytest.mark.parametrize(
    "facts",
    [
        cluster(**variables(NCCL_IB_DISABLE="1")),  # there is none
        cluster(**variables(NCCL_IB_DISABLE="0"), infiniband=IB),
        cluster(**variables(CUDA_LAUNCH_BLOCKING="1")),  # no GPU
        cluster(**variables(NCCL_DEBUG="WARN")),
        cluster(**variables(NCCL_SOCKET_IFNAME="^docker,lo", GLOO_SOCKET_IFNAME="eth0")),
        cluster([0, 1], level="avx512"),
        cluster(memlock_nbytes=64 << 10),  # matters with InfiniBand only
        [rank_of(0, 0, world_size=1, num_nodes=0, master="", name_address="127.0.1.1", num_threads=8)],
        # Two agents of torchrun on one host: all ranks are here, and loopback is their network.
        [
            rank_of(0, rank, master="127.0.0.1", name_address="127.0.1.1", towards_master="lo", num_threads=2)
            for rank in range(4)
        ],
    ],
)
def test_what_is_not_odd_is_let_be(facts: list[Facts]) -> None:
    assert odd(facts) == []


def test_the_odd_link_and_far_clocks_are_found() -> None:
    slow = ["b (ranks 2-3): 1.1 Gbit/s to its neighbours, the others have 9.4 Gbit/s"]
    links = [MeasuredLink("a (ranks 0-1)", "b (ranks 2-3)", 1e-4, 1e9)]
    clocks = [HostClockOffset("b (ranks 2-3)", 5.0, 1e-3)]
    found = odd(cluster(), MeasuredLinks(True, links, slow, clocks))
    assert [(each.grade.name, each.what) for each in found] == [
        ("WRONG", "a slow link"),
        ("NOTE", "clocks differ between hosts"),
    ]
    assert found[0].detail == slow[0]
    assert "+5.000 s" in found[1].detail
    assert odd(cluster(), MeasuredLinks(True, links, [], [HostClockOffset("b", 0.2, 1e-3)])) == []
    lame = [MeasuredLink("a", "b", 1e-4, 100e6)]  # 0.8 Gbit/s by cards of 10
    assert [each.what for each in odd(cluster(), MeasuredLinks(True, lame))] == ["links far below their cards"]


def test_any_facts_are_judged_without_a_traceback_and_with_fixes() -> None:
    rng = random.Random(0)
    texts = ["", "lo", "eth0", "127.0.0.1", "10.0.0.1", "::1", "::", "x" * 50, "1", "^", "=", ",", "\x1b[31m", "2.13.0"]
    choices: dict[type, list[Any]] = {
        str: texts,
        int: [-1, 0, 1, 2, 2**40],
        float: [0.0, 0.5, 64.0],
        bool: [True, False],
        dict: [{}, dict.fromkeys(["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"], ","), {"NCCL_DEBUG": "INFO"}],
    }
    for _ in range(300):
        facts = cluster()[: rng.randint(1, 4)]
        for index, each in enumerate(facts):
            for name in rng.sample([field.name for field in dataclasses.fields(Facts)], rng.randint(0, 12)):
                kind = type(getattr(each, name))
                if kind in choices and name not in ("rank", "world_size"):
                    each = dataclasses.replace(each, **{name: rng.choice(choices[kind])})
            nics = [Nic(rng.choice(texts), rng.choice(texts), rng.choice([0, 8, 64]), up=True) for _ in range(3)]
            facts[index] = dataclasses.replace(each, nics=rng.choice([[], nics, each.nics]))
        odd(facts)
        assert conclusion(examine(facts, None)).isprintable()
