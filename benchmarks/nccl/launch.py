"""Ranks as processes: on this host over loopback, or one on each host of a lab. What rank 0 finds is kept as it comes.

main ──job──▶ rank.py, rank 0..n-1      rank 0 writes a line "@@ {...}" for what is to be kept
     ◀─"@@"── rank 0                    everything else is shown only if a rank fails
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from netlab.lab import Lab, LabError, RankFailed
from netlab.rank_processes import GRACE_S, Ended, RankProcess, follow
from netlab.rank_processes import launch as prepared

MARK = "@@ "
_RANK = str(Path(__file__).resolve().parent / "rank.py")
_SHOWN = 3000  # characters of what a rank that failed wrote
_CONTEXT_S = 15.0
_MARGIN_S = 12.0  # from the end of measuring to when ranks are ended

Job = dict[str, Any]
Tell = Callable[[dict[str, Any]], None]


class Launch(NamedTuple):
    """How a launch went; `problem` is empty if all ranks ended well."""

    seconds: float
    problem: str


def on_loopback(job: Job, ranks: int, limit_s: float, extra: dict[str, str], tell: Tell) -> Launch:
    """Ranks of this host, which speak over the loopback device."""
    begun = time.monotonic()
    command = _command(job, limit_s)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    members: list[RankProcess] = []
    try:
        for rank in range(ranks):
            own = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
            env = os.environ | _habits() | extra | common | {name: str(value) for name, value in own.items()}
            members.append(RankProcess(rank, 0, prepared(command, env, [])))
        late = follow(members, limit_s, GRACE_S, _listen(tell))
        ended = [member.result() for member in members if member.code is not None]
    finally:
        for member in members:
            member.close()
    return Launch(time.monotonic() - begun, _problem(late, ended))


def on_hosts(job: Job, hosts: int, rate: str, limit_s: float, mps: dict[str, str], tell: Tell) -> Launch:
    """One rank on each host of a lab; they are clients of MPS if there is one and it serves them."""
    begun = time.monotonic()
    problem = ""
    try:
        with Lab(hosts=hosts, rate=rate, share_processes=bool(mps)) as lab:
            served = mps if mps and _serves(lab, mps, tell) else {}
            left_s = limit_s - (time.monotonic() - begun)
            lab.run(_command(job, left_s), env=_habits() | served, timeout=left_s, echo=_listen(tell))
    except RankFailed as failure:
        problem = _problem(str(failure).splitlines()[0], failure.ended)
    except LabError as failure:
        problem = str(failure)
    return Launch(time.monotonic() - begun, problem)


# What a rank does first with a GPU, without torch, which takes seconds.
_CONTEXT = """
import ctypes, sys
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
code = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
code = code or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
sys.exit(f"code {code} of the driver" if code else 0)
"""


def _serves(lab: Lab, mps: dict[str, str], tell: Tell) -> bool:
    """Whether MPS takes ranks of these hosts for clients: each makes a context."""
    try:
        lab.run([sys.executable, "-I", "-S", "-c", _CONTEXT], env=mps, timeout=_CONTEXT_S)
    except RankFailed as failure:
        said = next((each.output.strip().splitlines()[-1:] for each in failure.ended if each.code), [])
        tell({"note": f"no MPS in these hosts, so ranks take turns on the GPU: {' '.join(said) or 'no answer'}"})
        return False
    return True


def _command(job: Job, limit_s: float) -> list[str]:
    return [sys.executable, _RANK, json.dumps(job | {"until": time.time() + limit_s - _MARGIN_S})]


def _habits() -> dict[str, str]:
    threads = max(1, min(4, (os.cpu_count() or 1) // 4))
    return {"OMP_NUM_THREADS": str(threads), "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}


def _listen(tell: Tell) -> Callable[[int, str], None]:
    def echo(rank: int, line: str) -> None:
        if rank == 0 and line.startswith(MARK):
            tell(json.loads(line.removeprefix(MARK)))

    return echo


def _problem(late: str | None, ended: list[Ended]) -> str:
    failed = [each for each in ended if each.code]
    if not late and not failed:
        return ""
    texts = [late or f"{len(failed)} ranks failed"]
    for each in failed:
        kept = "\n".join(line for line in each.output.splitlines() if not line.startswith(MARK))
        texts.append(f"--- rank {each.rank}, code {each.code} ---\n{kept[-_SHOWN:]}")
    return "\n".join(texts)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
