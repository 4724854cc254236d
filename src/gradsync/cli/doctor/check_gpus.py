"""Checks of GPUs: one for each rank, alike on all hosts, within reach of each other and of the network card. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gradsync.cli.doctor.finding import Finding, Grade, by_host, who
from gradsync.cli.doctor.gpus import matrix
from gradsync.cli.doctor.rank_facts import Facts
from gradsync.launch.choose_backend import shared_gpu
from gradsync.launch.shared_gpus import NOTE, SWITCH
from gradsync.units import show_nbytes

_FAR = "SYS"  # through the link between two processors


def check_gpus(facts: Sequence[Facts]) -> list[Finding]:
    """Check how many GPUs each rank sees, and whether two take the same."""
    counts = {len(each.gpus) for each in facts}
    if counts == {0}:
        return [Finding(Grade.OK, "GPUs", "none: ranks compute on processors")]
    found = []
    if len(counts) > 1:
        groups = {count: [each for each in facts if len(each.gpus) == count] for count in sorted(counts)}
        told = "; ".join(f"{count} on {who(some)}" for count, some in groups.items())
        shown = sorted({each.variables.get("CUDA_VISIBLE_DEVICES", "(not set)") for each in facts})
        detail = f"{told}; CUDA_VISIBLE_DEVICES is {' or '.join(shown)}"
        fix = "unset CUDA_VISIBLE_DEVICES    # on every host, or set it to equally many; see nvidia-smi -L"
        found.append(Finding(Grade.WRONG, "ranks see different numbers of GPUs", detail, fix))
    taken = [each.gpus[each.device].uuid if 0 <= each.device < len(each.gpus) else None for each in facts]
    if (both := shared_gpu(taken)) is not None:
        title = f"ranks {both[0]} and {both[1]} share a GPU"
        if all(each.variables.get(SWITCH) == "1" for each in facts):
            found.append(Finding(Grade.NOTE, title, NOTE, f"unset {SWITCH}    # for a run whose speed counts"))
        else:
            detail = "NCCL cannot serve two ranks on one GPU by itself, and gloo through the host is many times slower"
            fix = f"torchrun --nproc-per-node={len(facts[both[0]].gpus)} ...    # or {SWITCH}=1, for a test"
            found.append(Finding(Grade.WRONG, title, detail, fix))
    kinds = sorted({f"{gpu.name} ({show_nbytes(gpu.nbytes)})" for each in facts for gpu in each.gpus})
    if len(kinds) > 1:
        detail = f"{', '.join(kinds)}: every step waits for the slowest"
        fix = "nvidia-smi -L    # then give the job hosts of one kind, or a smaller batch to the slower ones"
        found.append(Finding(Grade.NOTE, "GPUs of different kinds", detail, fix))
    return found or [Finding(Grade.OK, "GPUs", f"{max(counts)} × {kinds[0]} on each host")]


def check_topology(facts: Sequence[Facts]) -> list[Finding]:
    """Paths between the GPUs of a host, and from them to its network cards."""
    return [finding for host in by_host(facts).values() if host[0].gpus for finding in _paths(host)]


def _paths(host: Sequence[Facts]) -> list[Finding]:
    first, here, found = host[0], who(host), []
    count = len(first.gpus)
    apart = [
        f"{one}-{other}"
        for one in range(count)
        for other in range(one + 1, count)
        if other not in first.gpus[one].peers
    ]
    if apart:
        detail = f"GPUs {', '.join(apart[:8])}: their gradients go through the host's memory"
        fix = "nvidia-smi topo -p2p r    # then switch off ACS in the BIOS, or IOMMU by iommu=pt on the kernel's line"
        found.append(Finding(Grade.NOTE, f"GPUs do not reach each other on {here}", detail, fix))
    pairs = matrix(first.topology)
    if far := [f"{a}-{b}" for (a, b), path in pairs.items() if path == _FAR and b.startswith("GPU")]:
        detail = f"{', '.join(far[:8])} (SYS in nvidia-smi topo -m)"
        fix = "nvidia-smi topo -m    # then choose GPUs of one processor by CUDA_VISIBLE_DEVICES, where fewer will do"
        found.append(Finding(Grade.NOTE, f"GPUs of different processors on {here}", detail, fix))
    if lonely := _far_from_cards(pairs):
        detail = f"{', '.join(lonely[:8])}: no network card hangs at the same processor"
        fix = "nvidia-smi topo -m    # then name the nearest card in NCCL_IB_HCA or NCCL_SOCKET_IFNAME"
        found.append(Finding(Grade.NOTE, f"GPUs far from the network on {here}", detail, fix))
    if found or not pairs:
        return found
    kinds = sorted(set(pairs.values()))
    return [Finding(Grade.OK, f"topology of {here}", f"GPUs and network cards are joined by {', '.join(kinds)}")]


def _far_from_cards(pairs: dict[tuple[str, str], str]) -> list[str]:
    """GPUs all of whose ways to network cards cross processors.

    >>> _far_from_cards({("GPU0", "NIC0"): "SYS", ("GPU1", "NIC0"): "PIX"})
    ['GPU0']
    """
    ways: dict[str, set[str]] = {}
    for (one, other), path in pairs.items():
        for gpu, card in ((one, other), (other, one)):
            if gpu.startswith("GPU") and card.startswith("NIC"):
                ways.setdefault(gpu, set()).add(path)
    return sorted(gpu for gpu, paths in ways.items() if paths == {_FAR})
