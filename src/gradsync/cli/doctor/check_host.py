"""Checks of what each host allows its ranks: memory to share and lock, files, processors. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gradsync.cli.doctor.finding import Finding, Grade, by_host, who
from gradsync.cli.doctor.rank_facts import Facts
from gradsync.units import show_nbytes

_TINY_SHM, _SMALL_SHM = 64 << 20, 1 << 30  # Docker's default; what a few loader workers need
_LOCKED = 1 << 30
_FILES_AT_ALL, _FILES_PER_RANK = 1024, 16


def check_memory(facts: Sequence[Facts]) -> list[Finding]:
    """/dev/shm, memory without a name, locked memory."""
    found = [finding for host in by_host(facts).values() for finding in _shared_memory(host)]
    if lacking := [each for each in facts if not each.memfd]:
        found.append(
            Finding(
                Grade.NOTE,
                f"memory cannot be shared on {who(lacking)}",
                "the kernel or its sandbox refuses memfd_create, so ranks of a host exchange by loopback",
                "docker run --security-opt seccomp=unconfined ...    # or a kernel of 3.17 and later",
            )
        )
    if tight := [each for each in facts if each.infiniband and 0 <= each.memlock_nbytes < _LOCKED]:
        detail = f"{show_nbytes(tight[0].memlock_nbytes)}; InfiniBand needs memory that stays where it is"
        fix = "ulimit -l unlimited    # or docker run --ulimit memlock=-1"
        found.append(Finding(Grade.WRONG, f"little memory may be locked on {who(tight)}", detail, fix))
    smallest = min(each.shm_nbytes for each in facts)
    return found or [Finding(Grade.OK, "shared memory", f"/dev/shm of {show_nbytes(smallest)}, memfd works")]


def check_files(facts: Sequence[Facts]) -> list[Finding]:
    """Check how many files may be open: each peer is a few sockets."""
    tight = [each for each in facts if 0 <= each.num_files < max(_FILES_AT_ALL, _FILES_PER_RANK * each.world_size)]
    if not tight:
        return []
    detail = f"{tight[0].num_files}; each peer takes a few sockets, each loader worker a few files"
    fix = "ulimit -n 65536    # or docker run --ulimit nofile=65536"
    return [Finding(Grade.NOTE, f"few files may be open on {who(tight)}", detail, fix)]


def check_processors(facts: Sequence[Facts]) -> list[Finding]:
    """Cores, and how many threads the ranks of a host start on them."""
    return [finding for host in by_host(facts).values() for finding in _processors(host)]


def _shared_memory(host: Sequence[Facts]) -> list[Finding]:
    nbytes, free = host[0].shm_nbytes, host[0].shm_free_nbytes
    detail = f"{show_nbytes(max(nbytes, 0))}, {show_nbytes(max(free, 0))} free; loader workers"
    detail += " and NCCL" if host[0].gpus else ""
    fix = "sudo mount -o remount,size=8G /dev/shm    # or docker run --shm-size=8g"
    if nbytes <= _TINY_SHM:
        detail += " put their data there, and die of a bus error when it is full"
        return [Finding(Grade.WRONG, f"/dev/shm is tiny on {who(host)}", detail, fix)]
    if free < _TINY_SHM:
        return [Finding(Grade.WRONG, f"/dev/shm is full on {who(host)}", f"{detail} need it", "ls -lS /dev/shm | head")]
    if nbytes < _SMALL_SHM:
        return [Finding(Grade.NOTE, f"/dev/shm is small on {who(host)}", f"{detail} put their data there", fix)]
    return []


def _processors(host: Sequence[Facts]) -> list[Finding]:
    cores, ranks, here = host[0].usable_cpus, len(host), who(host)
    threads = sum(rank.num_threads for rank in host)
    fair = max(1, int(cores // ranks))
    limited = f" (of {host[0].num_cpus}, by affinity or a container's quota)" if cores < host[0].num_cpus else ""
    each = f"{host[0].num_threads} thread{'s' if host[0].num_threads > 1 else ''}"
    counted = (
        f"{cores:g} cores{limited}, {ranks} rank{'s' if ranks > 1 else ''} with {each}{' each' if ranks > 1 else ''}"
    )
    if ranks > cores:
        detail = f"{counted}: ranks take turns, and each synchronization waits for the last"
        fix = f"torchrun --nproc-per-node={max(1, int(cores))} ..."
        return [Finding(Grade.NOTE, f"more ranks than cores on {here}", detail, fix)]
    if threads > max(cores, ranks):
        detail = f"{counted}: {threads} threads fight for them"
        return [Finding(Grade.WRONG, f"too many threads on {here}", detail, f"export OMP_NUM_THREADS={fair}")]
    if fair >= 2 * max(rank.num_threads for rank in host) and not host[0].gpus:
        why = ", which torchrun sets where nothing is set" if host[0].variables.get("OMP_NUM_THREADS") == "1" else ""
        detail = f"{counted}{why}: each rank could use {fair}"
        return [Finding(Grade.NOTE, f"cores are idle on {here}", detail, f"export OMP_NUM_THREADS={fair}")]
    return [Finding(Grade.OK, f"processors of {here}", counted)]
