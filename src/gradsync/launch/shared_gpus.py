"""The sharing of a GPU over NCCL: a host id for each rank, and NVIDIA's server, which runs their kernels at once.

NCCL refuses two ranks whose host and whose GPU are the same ("Duplicate GPU detected"). A rank with a host id of its
own counts as a host, and what it sends goes through sockets. Order, errors, bytes and overlap are those of NCCL then;
the speed of NVLink and InfiniBand is not.

    rank 0 ─┐                       without MPS the GPU runs the kernels of one rank at a time, in slices,
            ├─ MPS ─ GPU            and every collective takes some milliseconds
    rank 1 ─┘
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from gradsync.errors import LaunchError, listed

SWITCH = "GRADSYNC_SHARE_GPUS"
HOST_ID = "NCCL_HOSTID"
NOTE = (
    "ranks share GPUs over NCCL, each as a host of its own, through sockets: the results are NCCL's, the speed is "
    "not that of NVLink or InfiniBand"
)

_OURS = "gradsync-rank-"
_OLDEST = (2, 14)  # which reads NCCL_HOSTID
_PROGRAM = "nvidia-cuda-mps-control"

# Ends the daemon when its input ends: with the process that started it, however that ended. $1: the program, $2: the
# folder. Where nobody waits for orphans, as in many containers, a daemon that has ended remains as a zombie.
_KEEPER = """
timeout 20 "$1" -d </dev/null >"$2/said" 2>&1 || exit 1
pid=$(cat "$2/pipe/nvidia-cuda-mps-control.pid")
echo started
cat >/dev/null
echo "quit -t 5" | timeout 20 "$1" >/dev/null 2>&1
for _ in $(seq 100); do
    grep -q "^State:.[^ZX]" "/proc/$pid/status" 2>/dev/null || break
    sleep 0.1
done
rm -rf "$2"
"""


def sharing_allowed(asked: bool | None, env: Mapping[str, str]) -> bool:
    """Return whether ranks may share a GPU over NCCL: as the caller says, else as the environment does.

    >>> sharing_allowed(None, {"GRADSYNC_SHARE_GPUS": "1"}), sharing_allowed(False, {"GRADSYNC_SHARE_GPUS": "1"})
    (True, False)
    """
    if asked is not None:
        if not isinstance(asked, bool):
            raise TypeError(f"share_gpus must be True or False, got {asked!r}")
        return asked
    text = env.get(SWITCH, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{SWITCH} must be 1, or 0 or unset, got {text!r}")
    return text == "1"


def ranks_that_share(gpus: Sequence[str | None]) -> list[int]:
    """The ranks whose GPU another one has too.

    >>> ranks_that_share(["a", "b", "a", None, None])
    [0, 2]
    """
    return [rank for rank, gpu in enumerate(gpus) if gpu is not None and list(gpus).count(gpu) > 1]


def own_host_id() -> str | None:
    """The host id that the user gave this process; None without one, or where it is one of ours."""
    name = os.environ.get(HOST_ID)
    return None if name is None or name.startswith(_OURS) else name


def nccl_version() -> tuple[int, ...] | None:
    """NCCL's version; None where torch has none."""
    return tuple(torch.cuda.nccl.version()) if torch.cuda.is_available() and dist.is_nccl_available() else None


def sharing_refusal(
    gpus: Sequence[str | None], host_ids: Sequence[str | None], versions: Sequence[Sequence[int] | None]
) -> str | None:
    """The sentence for which these ranks cannot share GPUs over NCCL, or None. Pure."""
    owners: dict[str, int] = {}
    for rank in ranks_that_share(gpus):
        version, name = versions[rank], host_ids[rank]
        if version is not None and tuple(version) < _OLDEST:
            told = ".".join(map(str, version))
            return f"ranks can share a GPU from NCCL 2.14 on, and rank {rank} has {told}: install a newer torch"
        if name is not None and owners.setdefault(name, rank) != rank:
            return (
                f"{listed([owners[name], rank])} share GPUs and both have NCCL_HOSTID={name}, so NCCL would take "
                "them for one host: unset NCCL_HOSTID, or give each rank another one"
            )
    return None


def nccl_variables(
    rank: int, gpus: Sequence[str | None], interface: str | None, env: Mapping[str, str]
) -> dict[str, str]:
    """Return what this rank's environment lacks for ranks on these GPUs, to be set before its first communicator.

    A rank with a GPU of its own keeps its host, but sends through sockets like the others: NCCL needs one way for all.

    >>> nccl_variables(2, ["a", "b", "a"], "lo", {"NCCL_SOCKET_IFNAME": "eth0"})
    {'NCCL_IB_DISABLE': '1', 'NCCL_HOSTID': 'gradsync-rank-2'}
    """
    sharing = ranks_that_share(gpus)
    wanted = {"NCCL_IB_DISABLE": "1"} if sharing else {}
    if sharing and interface is not None:
        wanted["NCCL_SOCKET_IFNAME"] = f"={interface}"  # that one, and none whose name begins so
    lacking = {name: value for name, value in wanted.items() if name not in env}
    if rank in sharing and (HOST_ID not in env or env[HOST_ID].startswith(_OURS)):
        lacking[HOST_ID] = f"{_OURS}{rank}"
    return lacking


def check_nccl_ranks(ranks: int) -> None:
    """Refuse, before any is started, that so many ranks of this machine use NCCL."""
    if not torch.cuda.is_available():
        raise LaunchError("ranks over NCCL need a GPU, and torch sees none here: leave nccl out for gloo")
    if not dist.is_nccl_available():
        raise LaunchError("ranks over NCCL need a torch that was built with it: leave nccl out for gloo")
    gpus = _dealt(ranks)
    sentence = sharing_refusal(gpus, [own_host_id()] * ranks, [nccl_version()] * ranks)
    if sentence is not None:
        raise LaunchError(sentence)


def take_gpu(rank: int, world_size: int) -> None:
    """Make the GPU of a rank of this machine the current one, in its turn, and set what it needs to share it."""
    gpus = _dealt(world_size)
    if own_host_id() is None:
        os.environ.pop(HOST_ID, None)  # of an earlier run of this process, with more ranks
    os.environ.update(nccl_variables(rank, gpus, os.environ.get("GLOO_SOCKET_IFNAME"), os.environ))
    torch.cuda.set_device(rank % torch.cuda.device_count())


def _dealt(ranks: int) -> list[str]:
    return [str(rank % torch.cuda.device_count()) for rank in range(ranks)]


class Mps:
    """NVIDIA's MPS server for as long as a `with` lasts: processes with its `environment` share a GPU without slices.

    It ends with the `with`, and with this process in any other case. A client that is killed within a kernel makes it
    unusable for all: ranks that are to die go without. It serves no client in another process namespace.
    """

    def __init__(self) -> None:
        self._folder = Path()
        self._keeper: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The variables that a client must have in its environment before it first uses the GPU."""
        pipe, log = str(self._folder / "pipe"), str(self._folder / "log")
        return {"CUDA_MPS_PIPE_DIRECTORY": pipe, "CUDA_MPS_LOG_DIRECTORY": log}

    def __enter__(self) -> Mps:
        if (program := shutil.which(_PROGRAM)) is None:
            raise LaunchError(
                f"there is no {_PROGRAM} in PATH, which comes with NVIDIA's driver: install it, or let ranks that "
                "share a GPU take turns"
            )
        self._folder = Path(tempfile.mkdtemp(prefix="gradsync-mps-"))
        for folder in self.environment.values():
            os.mkdir(folder)
        # Clients say which GPUs they see, by the numbers that these have without the daemon.
        env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | self.environment
        command = ["sh", "-c", _KEEPER, "sh", program, str(self._folder)]
        self._keeper = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, start_new_session=True
        )
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline() != b"started\n":
            said = (self._folder / "said").read_text(errors="replace").strip() or "it said nothing"
            self.close()
            raise LaunchError(f"{_PROGRAM} -d failed ({said}): let ranks that share a GPU take turns, without it")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server, and wait until it has ended."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.communicate()
            shutil.rmtree(self._folder, ignore_errors=True)
