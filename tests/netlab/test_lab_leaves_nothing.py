"""However a lab ends, its processes, namespaces and interfaces end with it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import pytest

from netlab.fixture import MakeLab
from netlab.lab import Lab, RankFailed
from netlab.reach import hang_on, interfaces

SCRIPT = Path(__file__).with_name("abandoned.py")
State = tuple[list[str], list[str]]

either = pytest.mark.parametrize("share", [False, True], ids=["own processes", "shared processes"])


@either
def test_nothing_is_left_after_the_end(lab: MakeLab, share: bool) -> None:
    before = _root_namespace()
    three = lab(hosts=3, share_processes=share)
    networks = [os.stat(f"/proc/{init}/ns/net").st_ino for init in three.inits]
    assert len(_inhabitants(networks)) == 6  # keeper and init of every host
    three.close()
    assert not _inhabitants(networks)
    assert _root_namespace() == before


@either
def test_a_rank_that_hangs_says_where_and_leaves_nothing(lab: MakeLab, share: bool) -> None:
    """Not even what it had moved out of its process group, once the lab is closed."""
    two = lab(share_processes=share)
    networks = [os.stat(f"/proc/{init}/ns/net").st_ino for init in two.inits]
    with pytest.raises(RankFailed, match=r"ranks \[1\] did not finish within") as failure:
        two.spawn(hang_on, 1, 1, timeout=3)
    assert "in wait_for_ever" in failure.value.ended[1].output
    two.close()
    assert not _inhabitants(networks)


@either
@pytest.mark.usefixtures("lab")
def test_nothing_is_left_after_the_process_was_killed(share: bool) -> None:
    before = _root_namespace()
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    creator = subprocess.Popen(
        [sys.executable, str(SCRIPT), *["share"] * share], stdout=subprocess.PIPE, text=True, env=env
    )
    with creator:
        try:
            assert creator.stdout is not None
            networks = json.loads(creator.stdout.readline())
            assert [creator.stdout.readline() for _ in range(3)] == ["up\n"] * 3
            ends = [os.pidfd_open(pid) for pid in _inhabitants(networks)]
            assert len(ends) >= 6 + 9  # keepers and inits; enter.py, the shell and its `sleep` of every rank
        finally:
            os.kill(creator.pid, signal.SIGKILL)
    _await_ends(ends)
    assert not _inhabitants(networks)
    assert _root_namespace() == before


@pytest.mark.usefixtures("lab")
def test_inhabitants_end_also_if_the_keepers_of_shared_hosts_are_killed() -> None:
    with Lab(share_processes=True) as two:
        networks = [os.stat(f"/proc/{init}/ns/net").st_ino for init in two.inits]
        keepers = [_parent(init) for init in two.inits]
        ends = [os.pidfd_open(pid) for pid in two.inits]
        two.run(["sh", "-c", "setsid sleep 1000 > /dev/null 2>&1 &"])
        for keeper in keepers:
            os.kill(keeper, signal.SIGKILL)
        _await_ends(ends)
        assert not _inhabitants(networks)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _root_namespace() -> State:
    """The interfaces out here, and the namespaces that have a name."""
    named = Path("/run/netns")
    return interfaces(), sorted(os.listdir(named)) if named.exists() else []


def _inhabitants(networks: Collection[int]) -> list[int]:
    """Every process that is in one of these networks."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            if os.stat(folder / "ns/net").st_ino in networks:
                found.append(int(folder.name))
    return found


def _await_ends(pidfds: list[int]) -> None:
    deadline = time.monotonic() + 30
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], max(0, deadline - time.monotonic()))[0], "a process lives on"
        os.close(pidfd)
